"""Environment variables that are on or off."""

from __future__ import annotations

import os
from collections.abc import Mapping

REFERENCE = "SGLANG_DSV4_REFERENCE"  # torch references instead of CUDA kernels
SPLIT = "SGLANG_DSV4_SPLIT"  # "moves" or "static", whatever `cache/sizing.py` would choose
CHECK_RANKS = "SGLANG_DSV4_CHECK_RANKS"  # ranks compare what they read and choose: attention/agreement.py


def switched_on(name: str, env: Mapping[str, str] | None = None) -> bool:
    """Whether the variable is set to anything but nothing and "0"; in `env`, or the process's own environment."""
    return (os.environ if env is None else env).get(name, "") not in ("", "0")

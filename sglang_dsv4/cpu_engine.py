"""What SGLang's CPU engine needs for a state model. Runs in processes that serve our model, and nowhere else.

SGLang allows tracked state on accelerators only, and pins host memory in a few places without asking whether there
is an accelerator to pin it for.
"""

from __future__ import annotations

from typing import Any

import torch


def prepare() -> None:
    """Make this process fit for our model on a machine without a GPU; nothing where there is one."""
    if torch.cuda.is_available():
        return
    from sglang.srt.arg_groups import mamba_hook

    mamba_hook._platform_supports_mamba_cache_extra_buffer = lambda: True
    _ignore_pinning()


def _ignore_pinning() -> None:
    if getattr(torch.tensor, "_dsv4_unpinned", False):
        return
    original = torch.tensor

    def tensor(*args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("pin_memory", None)
        return original(*args, **kwargs)

    tensor._dsv4_unpinned = True  # type: ignore[attr-defined]
    torch.tensor = tensor
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self  # type: ignore[method-assign]

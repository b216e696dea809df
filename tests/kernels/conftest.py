"""Shared by the kernel tests: what needs a GPU is skipped, with the reason, where there is none."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    """The CUDA device that kernels run on."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: the kernels are compiled but not run here")
    return torch.device("cuda", torch.cuda.current_device())

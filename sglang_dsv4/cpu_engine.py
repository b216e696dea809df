"""What SGLang's CPU engine needs for a state model; registered where SGLANG_USE_CPU_ENGINE=1 only.

SGLang pins host memory in a few places without asking whether there is an accelerator, and allows tracked state on
accelerators only.
"""

from __future__ import annotations

from typing import Any

import torch


def register() -> None:
    if torch.cuda.is_available():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.arg_groups.mamba_hook._platform_supports_mamba_cache_extra_buffer",
        lambda original: True,
        HookType.AROUND,
    )
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

"""Stand-in for SGLang's compiled kernels on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor

__version__ = "0+cpu.shim"


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    row_length: int,
) -> None:
    """Write each request's new token locations, which lie one after another in `out_cache_loc`, into its row.

    req_to_token [rows, row_length]; request b's locations go to columns [start_offset[b], end_offset[b]).
    """
    lengths = (end_offset - start_offset).tolist()
    for row, start, locations in zip(
        req_pool_indices.tolist(), start_offset.tolist(), out_cache_loc.split(lengths), strict=True
    ):
        req_to_token[row, start : start + locations.numel()] = locations.to(req_to_token.dtype)


def _refuse(name: str) -> Callable[..., NoReturn]:
    def call(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} does not exist on a machine without a GPU")

    return call


def __getattr__(name: str) -> Callable[..., NoReturn]:
    # SGLang imports a dozen of these by name at module level; only a call may fail.
    if name.endswith("_cpu"):
        return _refuse(name)
    raise AttributeError(f"module 'sgl_kernel' has no attribute {name!r}")

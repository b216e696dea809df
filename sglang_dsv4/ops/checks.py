"""Argument checks of the operations: one ValueError that names the argument, what it was and must be.

They look at dtype, shape, stride, alignment and device only, never at values: nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sglang_dsv4.formats import RowCodec
from sglang_dsv4.geometry import GROUP_ROWS, PAGE_SIZES, RowLayout
from sglang_dsv4.ops.meta import StepMeta

Dim = int | str | None  # an exact size, a name that must agree between arguments, or anything
FLOATS = (torch.bfloat16, torch.float32)
_META_FIELDS: tuple[tuple[str, torch.dtype, tuple[Dim, ...]], ...] = (
    ("req_rows", torch.int32, ("requests",)),
    ("slots", torch.int32, ("requests",)),
    ("prefix_lens", torch.int32, ("requests",)),
    ("seq_lens", torch.int32, ("requests",)),
    ("token_offsets", torch.int32, ("requests + 1",)),
    ("token_to_req", torch.int32, ("tokens",)),
    ("positions", torch.int64, ("tokens",)),
    ("page_table", torch.int32, ("requests", None)),
    ("snapshot_slots", torch.int32, ("requests", "snapshots")),
    ("snapshot_lens", torch.int32, ("requests", "snapshots")),
)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Check:
    """Checks the arguments of one call of operation `op`; named dimensions must agree between them."""

    def __init__(self, op: str) -> None:
        self.op = op
        self.dims: dict[str, int] = {}
        self.device: torch.device | None = None

    def fail(self, argument: str, was: str, must: str) -> ValueError:
        return ValueError(f"{self.op}: {argument} is {was}, must be {must}")

    def _shape(self, shape: Sequence[Dim]) -> str:
        parts = []
        for dim in shape:
            known = self.dims.get(dim) if isinstance(dim, str) else dim
            parts.append("any" if dim is None else str(dim) if known is None else str(known))
        return f"[{', '.join(parts)}]"

    def tensor(
        self,
        argument: str,
        value: Any,
        dtypes: torch.dtype | Sequence[torch.dtype],
        shape: Sequence[Dim],
        *,
        strided: int = 0,
        align: int = 1,
    ) -> Tensor:
        """Check one tensor and return it.

        `strided` leading dimensions may have any stride (the rest is contiguous); the address and those
        strides are multiples of `align` bytes. All tensors of a call lie on one device.
        """
        allowed = (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
        want = f"{' or '.join(map(_name, allowed))} {self._shape(shape)}"
        if not isinstance(value, Tensor):
            raise self.fail(argument, type(value).__name__, f"a tensor, {want}")
        sizes = tuple(value.shape)
        fits = len(sizes) == len(shape) and value.dtype in allowed
        if fits:
            for dim, size in zip(shape, sizes, strict=True):
                if isinstance(dim, str):
                    fits = fits and self.dims.setdefault(dim, size) == size
                else:
                    fits = fits and dim in (None, size)
        if not fits:
            raise self.fail(argument, f"{_name(value.dtype)} {list(sizes)}", want)
        if self.device is None:
            self.device = value.device
        elif value.device != self.device:
            raise self.fail(argument, f"on {value.device}", f"on {self.device} like the other tensors")
        self._layout(argument, value, strided, align)
        return value

    def _layout(self, argument: str, value: Tensor, strided: int, align: int) -> None:
        if value.numel() == 0:
            return
        expected = 1
        for dim in range(value.dim() - 1, strided - 1, -1):
            if value.shape[dim] != 1 and value.stride(dim) != expected:
                raise self.fail(
                    argument,
                    f"strided {list(value.stride())}",
                    f"contiguous{f' in all but its first {strided} dimensions' if strided else ''}",
                )
            expected *= value.shape[dim]
        if align > 1:
            steps = [value.stride(d) * value.element_size() for d in range(strided) if value.shape[d] != 1]
            if value.data_ptr() % align or any(step % align for step in steps):
                raise self.fail(argument, f"at address {value.data_ptr():#x} with strides {steps} B",
                                f"aligned to {align} bytes")  # fmt: skip

    def meta(self, meta: StepMeta) -> tuple[Any, ...]:
        """Check a step's metadata and return it in the order of the kernels' parameters."""
        values = tuple(getattr(meta, field) for field, _, _ in _META_FIELDS)
        # One step passes the same tensors to every layer: look at them once. Held, so that no other tensor
        # can take the identity of one that was looked at.
        checked = meta.__dict__.get("_checked", ())
        if len(checked) != len(values) or any(a is not b for a, b in zip(checked, values, strict=True)):
            inner = Check(self.op)
            for (field, dtype, shape), value in zip(_META_FIELDS, values, strict=True):
                wide = field in ("page_table", "snapshot_slots", "snapshot_lens")
                inner.tensor(f"meta.{field}", value, dtype, shape, strided=1 if wide else 0)
                if field == "token_offsets" and inner.dims["requests + 1"] != inner.dims["requests"] + 1:
                    must = f"int32 [{inner.dims['requests'] + 1}], one more than there are requests"
                    raise inner.fail("meta.token_offsets", f"int32 {list(value.shape)}", must)
            if meta.snapshot_slots.stride(0) != meta.snapshot_lens.stride(0):
                raise inner.fail("meta.snapshot_lens", f"strided {list(meta.snapshot_lens.stride())}",
                                 "strided like meta.snapshot_slots")  # fmt: skip
            if meta.page_size not in PAGE_SIZES:
                raise inner.fail("meta.page_size", repr(meta.page_size), " or ".join(map(str, PAGE_SIZES)))
            meta.__dict__["_checked"] = values
        if self.device is None:
            self.device = meta.device
        elif meta.device != self.device:
            raise self.fail("meta", f"on {meta.device}", f"on {self.device} like the other tensors")
        self.dims["tokens"], self.dims["requests"] = meta.num_tokens, meta.num_requests
        return (*values, meta.page_size)

    def codec(self, argument: str, codec: RowCodec, layouts: Sequence[RowLayout]) -> None:
        """Check that a codec's rows are of a kind that the kernels store."""
        if codec.layout not in layouts:
            raise self.fail(
                argument,
                f"a codec of {codec.layout.name} rows ({codec.layout.row_bytes} B)",
                " or ".join(f"{layout.name} ({layout.row_bytes} B)" for layout in layouts)
                + "; the torch reference serves the others",
            )

    def pool(self, argument: str, value: Any, layout: RowLayout) -> Tensor:
        """Check a row pool, uint8 [groups, group bytes] of `layout`."""
        pool = self.tensor(argument, value, torch.uint8, (None, layout.group_bytes), strided=1, align=16)
        if pool.shape[0] >= 2**31 // GROUP_ROWS * 2:
            raise self.fail(argument, f"{pool.shape[0]} groups", "fewer than 2^26 groups")
        return pool

    def cuda(self) -> int:
        """Index of the CUDA device that all tensors lie on."""
        if self.device is None or self.device.type != "cuda":
            raise self.fail("device", str(self.device), "cuda; the torch reference serves other devices")
        index = self.device.index
        return torch.cuda.current_device() if index is None else index

"""Memory behind reserved addresses, in granules that move between the stores of slots and those of pages.

A `Backing` reserves the addresses of one group of stores at their largest (`granules.Group`) and has memory behind as
many items as `resize` was last told. The granules come from one `Memory`, which never hands out more than its budget:
what one group gave back is what the other gets. Tensors keep their addresses, so a captured graph goes on reading
through them.

Three kinds: CUDA (the driver's virtual memory calls, by ctypes), the host (anonymous mappings; what is given back
goes back to the kernel), and meta tensors for bookkeeping without bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang_dsv4.cache.debug import poison_enabled

if TYPE_CHECKING:
    from sglang_dsv4.cache.granules import Group, Region, SplitPlan


class Memory:
    """Granules that may be in use at once."""

    def __init__(self, budget: int, granule: int) -> None:
        self.granule = granule
        self.most, self.used = budget // granule, 0

    @property
    def nbytes(self) -> int:
        return self.used * self.granule

    def take(self, count: int) -> None:
        """Raises RuntimeError beyond the budget."""
        if self.used + count > self.most:
            raise RuntimeError(f"{self.used} + {count} granules are more than {self.most}: release before you commit")
        self.used += count

    def give(self, count: int) -> None:
        self.used -= count

    def close(self) -> None:
        """Give back what no store has. Not to be used any more."""


class Backing:
    """Bookkeeping only; the tensors are on the meta device."""

    def __init__(self, group: Group, memory: Memory) -> None:
        self.group, self.memory, self.items = group, memory, 0
        self._regions: dict[str, Any] = {}
        try:
            for region in group.regions:
                self._regions[region.name] = self._reserve(region)
        except BaseException:
            self.close()
            raise

    def tensor(self, name: str) -> Tensor:
        """uint8 [layers, units, unit bytes]: all addresses, whether or not there is memory behind them."""
        region = next(one for one in self.group.regions if one.name == name)
        whole: Tensor = self._regions[name]
        units = region.stride // region.unit_bytes
        return whole[: region.layers * region.stride].view(region.layers, units, region.unit_bytes)

    @property
    def nbytes(self) -> int:
        return self.group.nbytes(self.items)

    def resize(self, items: int) -> None:
        """Have memory behind the leading `items` of every layer and nothing else. No step may be in flight."""
        for region in self.group.regions:
            if items > self.items:
                parts = list(region.between(self.items, items)) if self.items else self._all(region, items)
                self.memory.take(sum(map(len, parts)))
                for part in parts:
                    self._commit(region, part)
            else:
                parts = list(region.between(items, self.items))
                for part in parts:
                    self._release(region, part)
                self.memory.give(sum(map(len, parts)))
        self.items = items

    def close(self) -> None:
        """Give everything back, also what a call that failed left half done. No tensor may be used any more."""

    @staticmethod
    def _all(region: Region, items: int) -> list[range]:
        parts, end = [], 0
        for first, last in region.spans(items):
            parts.append(range(max(first, end), last))
            end = max(end, last)
        return parts

    def _reserve(self, region: Region) -> Any:
        return torch.empty(region.nbytes, dtype=torch.uint8, device="meta")

    def _commit(self, region: Region, part: range) -> None: ...

    def _release(self, region: Region, part: range) -> None: ...


class HostBacking(Backing):
    """Anonymous mappings, which cost nothing until they are written."""

    def _reserve(self, region: Region) -> Tensor:
        self._maps = getattr(self, "_maps", {})
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory would stay where it is
        memory = self._maps[region.name] = mmap.mmap(-1, region.nbytes, flags=flags)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def _release(self, region: Region, part: range) -> None:
        start, length = part.start * region.granule, len(part) * region.granule
        if poison_enabled():  # whoever reads there gets NaN
            self._regions[region.name][start : start + length] = 0xFF
        elif not (start % mmap.PAGESIZE or length % mmap.PAGESIZE):
            self._maps[region.name].madvise(mmap.MADV_DONTNEED, start, length)


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


_OUT_OF_MEMORY = 2
_VIRTUAL_MEMORY = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED


class Driver:
    """The virtual memory calls of the CUDA driver on one device. Raises RuntimeError, naming the call that failed."""

    def __init__(self, device: int) -> None:
        torch.cuda.init()
        torch.zeros(1, device=f"cuda:{device}")  # makes the primary context current, as the calls below need
        self._library = ctypes.CDLL("libcuda.so.1")
        self.device = device
        self.properties = _Properties(type=1, location=_Location(1, device))
        self.access = _Access(_Location(1, device), 3)

    def maps(self) -> bool:
        """Whether the device has virtual memory management: some virtual machines pass on a card without it."""
        found, which = ctypes.c_int(), ctypes.c_int(_VIRTUAL_MEMORY)
        self._call("cuDeviceGetAttribute", ctypes.byref(found), which, ctypes.c_int(self.device))
        return bool(found.value)

    def granularity(self) -> int:
        size = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(self.properties), ctypes.c_int(0))
        return size.value

    def reserve(self, size: int, alignment: int) -> int:
        address, zero = ctypes.c_uint64(), ctypes.c_uint64(0)
        sizes = ctypes.c_size_t(size), ctypes.c_size_t(alignment)
        self._call("cuMemAddressReserve", ctypes.byref(address), *sizes, zero, zero)
        return address.value

    def create(self, size: int) -> int:
        handle, flags = ctypes.c_uint64(), ctypes.c_uint64(0)
        self._call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(self.properties), flags)
        return handle.value

    def map(self, address: int, size: int, handle: int) -> None:
        none, flags = ctypes.c_size_t(0), ctypes.c_uint64(0)
        where = ctypes.c_uint64(address), ctypes.c_size_t(size)
        self._call("cuMemMap", *where, none, ctypes.c_uint64(handle), flags)

    def allow(self, address: int, size: int) -> None:
        where = ctypes.c_uint64(address), ctypes.c_size_t(size)
        self._call("cuMemSetAccess", *where, ctypes.byref(self.access), ctypes.c_size_t(1))

    def unmap(self, address: int, size: int) -> None:
        self._call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(size))

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", ctypes.c_uint64(handle))

    def free_addresses(self, address: int, size: int) -> None:
        self._call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(size))

    def _call(self, name: str, *arguments: object) -> None:
        function = getattr(self._library, name, None)
        if function is None:
            raise RuntimeError(f"the driver has no {name}")
        if status := function(*arguments):
            what = "out of memory" if status == _OUT_OF_MEMORY else f"status {status}"
            raise RuntimeError(f"{name} failed: {what}")


class CudaMemory(Memory):
    """Granules of one device, all created at once: a move can then find no memory missing. Raises RuntimeError."""

    def __init__(self, budget: int, granule: int, device: int) -> None:
        super().__init__(budget, granule)
        torch.cuda.empty_cache()  # what torch keeps for itself is not there for the driver
        self.device, self.driver = device, Driver(device)
        if granule % self.driver.granularity():
            raise RuntimeError(f"granules of {granule} bytes are no multiple of {self.driver.granularity()}")
        self._idle: list[int] = []
        try:
            for _ in range(self.most):
                self._idle.append(self.driver.create(granule))
        except RuntimeError:
            self.close()
            raise

    def handle(self) -> int:
        return self._idle.pop()

    def idle(self, handle: int) -> None:
        self._idle.append(handle)

    def close(self) -> None:
        while self._idle:
            with contextlib.suppress(RuntimeError):
                self.driver.release(self._idle.pop())


class CudaBacking(Backing):
    """One reservation a store; a handle a granule, because a handle is mapped and unmapped as a whole."""

    memory: CudaMemory

    def _reserve(self, region: Region) -> Tensor:
        self._bases = getattr(self, "_bases", {})
        self._handles: dict[tuple[str, int], int] = getattr(self, "_handles", {})
        address = self._bases[region.name] = self.memory.driver.reserve(region.nbytes, region.granule)
        return tensor_at(address, region.nbytes, self.memory.device)

    def _commit(self, region: Region, part: range) -> None:
        base, driver = self._bases[region.name], self.memory.driver
        for granule in part:
            handle = self.memory.handle()
            try:
                driver.map(base + granule * region.granule, region.granule, handle)
            except RuntimeError:
                self.memory.idle(handle)
                raise
            self._handles[region.name, granule] = handle
        if len(part):
            driver.allow(base + part.start * region.granule, len(part) * region.granule)

    def _release(self, region: Region, part: range) -> None:
        for granule in part:
            self.memory.driver.unmap(self._bases[region.name] + granule * region.granule, region.granule)
            self.memory.idle(self._handles.pop((region.name, granule)))

    def close(self) -> None:
        sizes, bases = {region.name: region for region in self.group.regions}, getattr(self, "_bases", {})
        for name, granule in list(getattr(self, "_handles", {})):
            with contextlib.suppress(RuntimeError):  # a device that is lost refuses everything: go on with the rest
                self._release(sizes[name], range(granule, granule + 1))
        while bases:
            name, base = bases.popitem()
            with contextlib.suppress(RuntimeError):
                self.memory.driver.free_addresses(base, sizes[name].nbytes)


def tensor_at(address: int, nbytes: int, device: int) -> Tensor:
    """uint8 [nbytes] at a device address that somebody else owns."""
    where = torch.device("cuda", device)
    storage = torch._C._construct_storage_from_data_pointer(address, where, nbytes)
    return torch.empty(0, dtype=torch.uint8, device=where).set_(storage, 0, (nbytes,), (1,))


def backing_for(device: str | torch.device, group: Group, memory: Memory) -> Backing:
    kind = torch.device(device).type
    return {"meta": Backing, "cpu": HostBacking, "cuda": CudaBacking}[kind](group, memory)


def _ordinal(where: torch.device) -> int:
    return torch.cuda.current_device() if where.index is None else where.index


def cannot_move(device: str | torch.device) -> str | None:
    """Why memory cannot move between stores on that device; None where it can."""
    where = torch.device(device)
    if where.type != "cuda":
        return None
    try:
        return None if Driver(_ordinal(where)).maps() else "the driver has no virtual memory management for this device"
    except (AssertionError, AttributeError, OSError, RuntimeError) as error:
        return str(error)


def memory_for(device: str | torch.device, budget: int, granule: int) -> Memory:
    where = torch.device(device)
    if where.type == "cuda":
        return CudaMemory(budget, granule, _ordinal(where))
    return Memory(budget, granule)


@dataclass(frozen=True)
class Moving:
    """Stores of slots and of pages over one memory."""

    plan: SplitPlan
    memory: Memory
    slots: Backing
    pages: Backing

    def close(self) -> None:
        for part in (self.slots, self.pages, self.memory):
            part.close()


def memory_behind(device: str | torch.device, plan: SplitPlan) -> Moving:
    """All that the plan's stores ever need, as the split begins. Raises OSError or RuntimeError, and then keeps
    nothing."""
    memory = memory_for(device, plan.budget, plan.granule)
    made: list[Backing] = []
    try:
        for group, items in ((plan.slot_stores, plan.slots + 1), (plan.page_stores, plan.pages + 1)):
            made.append(backing_for(device, group, memory))
            made[-1].resize(items)
    except BaseException:
        for store in made:
            store.close()
        memory.close()
        raise
    return Moving(plan, memory, *made)

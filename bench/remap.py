"""What it costs to move physical GPU memory between two reservations: the price of a split that moves at run time.

    python bench/remap.py [--lots 64] [--out FILE]

Talks to the CUDA driver alone; allocates no more than the lots it moves, of 2 MiB, the least that can be mapped.
V4-Flash keeps slots in the windows of 43 layers and the overlap rows of 21, pages in the entries of 41 layers and the
keys of 21; a lot holds 28 slots of a window and 102 of an overlap row.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from measure import positive
from rivals import card

LOT = 2 << 20
SLOT_STORES = 43 + 21
TURNS = 7


class Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class Access(ctypes.Structure):
    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class Driver:
    """The driver's virtual memory calls on device 0. Raises RuntimeError, naming the call that failed."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.properties = Properties(type=1, location=Location(1, 0))
        self.access = Access(Location(1, 0), 3)

    def call(self, name: str, *arguments: object) -> None:
        status = getattr(self.library, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} failed with status {status}")

    def reserve(self, size: int) -> int:
        address = ctypes.c_uint64()
        zero = ctypes.c_uint64(0)
        self.call("cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(size), ctypes.c_size_t(LOT), zero, zero)
        return address.value

    def create(self) -> int:
        handle = ctypes.c_uint64()
        flags = ctypes.c_uint64(0)
        self.call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(LOT), ctypes.byref(self.properties), flags)
        return handle.value

    def map(self, address: int, handle: int) -> None:
        none, flags = ctypes.c_size_t(0), ctypes.c_uint64(0)
        self.call("cuMemMap", ctypes.c_uint64(address), ctypes.c_size_t(LOT), none, ctypes.c_uint64(handle), flags)

    def allow(self, address: int, size: int) -> None:
        arguments = ctypes.c_uint64(address), ctypes.c_size_t(size), ctypes.byref(self.access), ctypes.c_size_t(1)
        self.call("cuMemSetAccess", *arguments)

    def unmap(self, address: int, size: int) -> None:
        self.call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(size))

    def wait(self) -> None:
        self.call("cuCtxSynchronize")


def microseconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e6


def moves(driver: Driver, lots: int) -> dict[str, float]:
    """Median microseconds a lot for taking it from one reservation and giving it to another, scattered like stores."""
    source, target = driver.reserve(2 * lots * LOT), driver.reserve(2 * lots * LOT)
    handles = [driver.create() for _ in range(lots)]
    places = [2 * i * LOT for i in range(lots)]  # not side by side: each store has a reservation of its own

    def give(base: int) -> None:
        for place, handle in zip(places, handles, strict=True):
            driver.map(base + place, handle)

    def open_to_kernels(base: int) -> None:
        for place in places:
            driver.allow(base + place, LOT)

    def take(base: int) -> None:
        for place in places:
            driver.unmap(base + place, LOT)

    give(source)
    open_to_kernels(source)
    times: dict[str, list[float]] = {"unmap": [], "map": [], "set access": []}
    for turn in range(TURNS):
        old, new = (source, target) if turn % 2 == 0 else (target, source)
        driver.wait()
        times["unmap"].append(microseconds(lambda old=old: take(old)) / lots)
        times["map"].append(microseconds(lambda new=new: give(new)) / lots)
        times["set access"].append(microseconds(lambda new=new: open_to_kernels(new)) / lots)
    return {name: round(statistics.median(each), 2) for name, each in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lots", type=positive, default=SLOT_STORES, help="mappings that move together")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    try:
        times = moves(Driver(), options.lots)
    except (OSError, RuntimeError) as error:
        print(f"remap: {error}", file=sys.stderr)
        return 1
    result = {
        "card": card(),
        "commit": options.commit,
        "lots": options.lots,
        "us_a_lot": times,
        "ms_in_all": round(sum(times.values()) * options.lots / 1e3, 3),
        "slots_in_a_lot_of_a_window": LOT // 74_880,
    }
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Which granules of physical memory the stores need for so many slots and so many pages: pure arithmetic.

Every store reserves addresses for as many slots or pages as it could ever hold, layer after layer, and has memory
behind the leading ones of each layer only. Memory comes in granules (2 MiB on CUDA). Layers do not begin at
granules, and are given lengths that spread their beginnings over a granule: so adding a few slots needs a granule in
some layers and none in the others, and memory can move in lots smaller than the slots of a granule. The price is
about one granule a layer and store that is not full.

    reserved   |<- layer 0 ------------------>|<- layer 1 ------------------>| ...
    used       |xxxxxxxxx                     |xxxxxxxxx                     |
    granules  |....|....|....|    |    |    |....|....|....|    |    |    |
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from sglang_dsv4.geometry import (
    CSA_RATIO,
    CSA_STATE_DIM,
    GROUP_ROWS,
    HCA_RATIO,
    STATE_BYTES,
    STATE_PARTS,
    WINDOW_GROUPS,
    Geometry,
)

GRANULE = 2 << 20  # the least that CUDA maps
_SPREAD = (5**0.5 - 1) / 2  # of a granule, by which the next layer begins later: no two layers come close
_LONGER = 64  # items by which a store may be longer for that


@dataclass(frozen=True)
class Region:
    """A store's reserved addresses.

    unit_bytes      of which a layer has a whole number
    units_per_item  an item is a slot or a page
    most            items of a layer, the dummy included
    """

    name: str
    layers: int
    unit_bytes: int
    units_per_item: Fraction
    most: int
    granule: int

    def used(self, items: int) -> int:
        """Bytes of a layer's leading items."""
        return math.ceil(items * self.units_per_item) * self.unit_bytes

    @property
    def stride(self) -> int:
        """Bytes from a layer to the next."""
        return self.used(self.most)

    @property
    def nbytes(self) -> int:
        """Reserved, whole granules."""
        return -(-self.layers * self.stride // self.granule) * self.granule

    def granules(self, items: int) -> int:
        """Granules behind the leading items of all layers."""
        count, end = 0, 0
        for first, last in self.spans(items):
            count += max(0, last - max(first, end))
            end = max(end, last)
        return count

    def between(self, fewer: int, more: int) -> Iterator[range]:
        """The granules that `more` items need and `fewer` do not, as ranges."""
        small, large = list(self.spans(fewer)), list(self.spans(more))
        for layer, ((_, begin), (_, end)) in enumerate(zip(small, large, strict=True)):
            following = small[layer + 1][0] if layer + 1 < self.layers else end
            if (end := min(end, following)) > begin:
                yield range(begin, end)

    def spans(self, items: int) -> Iterator[tuple[int, int]]:
        """First and last granule (exclusive) behind the leading items of each layer; neighbours may share one."""
        used, stride = self.used(items), self.stride
        for start in range(0, self.layers * stride, stride):
            yield start // self.granule, -(-(start + used) // self.granule)


@dataclass(frozen=True)
class Group:
    """Stores whose items stand side by side: those of slots, or those of pages."""

    regions: tuple[Region, ...]

    @property
    def most(self) -> int:
        return self.regions[0].most

    def nbytes(self, items: int) -> int:
        """Bytes of memory behind so many items."""
        return sum(region.granules(items) * region.granule for region in self.regions)

    def fitting(self, nbytes: int) -> int:
        """Most items that so many bytes hold."""
        return bisect_right(range(self.most + 1), nbytes, key=self.nbytes) - 1


def slot_group(geometry: Geometry, most: int, granule: int) -> Group:
    overlap = CSA_RATIO * STATE_PARTS * CSA_STATE_DIM * STATE_BYTES
    csa = len(geometry.layers_of(CSA_RATIO))
    return _group(
        most,
        granule,
        ("windows", geometry.num_layers, geometry.main.group_bytes, Fraction(WINDOW_GROUPS)),
        ("overlaps", csa, overlap, Fraction(1)),
    )


def page_group(geometry: Geometry, most: int, granule: int) -> Group:
    csa, hca = len(geometry.layers_of(CSA_RATIO)), len(geometry.layers_of(HCA_RATIO))
    groups_csa, groups_hca = (Fraction(geometry.page_size, ratio * GROUP_ROWS) for ratio in (CSA_RATIO, HCA_RATIO))
    return _group(
        most,
        granule,
        ("csa", csa, geometry.main.group_bytes, groups_csa),
        ("keys", csa, geometry.index.group_bytes, groups_csa),
        ("hca", hca, geometry.main.group_bytes, groups_hca),
    )


def _group(most: int, granule: int, *stores: tuple[str, int, int, Fraction]) -> Group:
    if missing := [name for name, layers, *_ in stores if not layers]:
        raise ValueError(f"the model has no layer with {missing[0]}")

    def uneven(items: int) -> float:
        return abs(Region(*stores[0], items, granule).stride % granule / granule - _SPREAD)

    best = min(range(most, most + _LONGER), key=uneven)
    return Group(tuple(Region(*store, best, granule) for store in stores))


@dataclass(frozen=True)
class SplitPlan:
    """One number of bytes for slots and pages. Numbers of slots and pages are without dummy and padding page.

    least_slots, least_pages  what stays in any case
    slots, pages              at first
    """

    slot_stores: Group
    page_stores: Group
    budget: int
    least_slots: int
    least_pages: int
    slots: int
    pages: int

    @property
    def granule(self) -> int:
        return self.slot_stores.regions[0].granule

    def nbytes(self, slots: int, pages: int) -> int:
        return self.slot_stores.nbytes(slots + 1) + self.page_stores.nbytes(pages + 1)

    def pages_beside(self, slots: int) -> int:
        """Most pages beside so many slots."""
        return self.page_stores.fitting(self.budget - self.slot_stores.nbytes(slots + 1)) - 1

    @property
    def most_slots(self) -> int:
        """Slots beside the least pages."""
        return self.slot_stores.fitting(self.budget - self.page_stores.nbytes(self.least_pages + 1)) - 1


def plan_split(
    geometry: Geometry, budget: int, *, slots: int, least_slots: int, least_pages: int, granule: int = GRANULE
) -> SplitPlan:
    """Stores that can hold all that `budget` bytes allow. Raises ValueError where they do not hold the least."""
    page_bytes = geometry.page_pool_bytes(64 * geometry.page_size) // 64
    most_slots = (budget - least_pages * page_bytes) // geometry.slot_bytes + 2
    most_pages = (budget - least_slots * geometry.slot_bytes) // page_bytes + 2
    if min(most_slots, most_pages) < 3:
        raise ValueError(f"{budget} bytes hold neither {least_slots} slots nor {least_pages} pages")
    slot_stores = slot_group(geometry, max(most_slots, slots + 1), granule)
    page_stores = page_group(geometry, most_pages, granule)
    plan = SplitPlan(slot_stores, page_stores, budget, least_slots, least_pages, slots, 0)
    pages = plan.pages_beside(slots)
    if pages < least_pages:
        raise ValueError(f"{budget} bytes do not hold {slots} slots and {least_pages} pages in granules of {granule}")
    return SplitPlan(slot_stores, page_stores, budget, least_slots, least_pages, slots, pages)


def plan_around(
    geometry: Geometry, *, slots: int, pages: int, least_slots: int, least_pages: int, granule: int = GRANULE
) -> SplitPlan:
    """The same for the bytes that so many slots and pages need."""
    raw = geometry.slot_pool_bytes(slots + 1) + geometry.page_pool_bytes((pages + 1) * geometry.page_size)
    slack = overhead(geometry, granule)
    plan = plan_split(
        geometry,
        raw + 2 * slack,
        slots=slots,
        least_slots=least_slots,
        least_pages=min(pages, least_pages),
        granule=granule,
    )
    return dataclasses.replace(plan, budget=plan.nbytes(slots, pages), pages=pages)


def overhead(geometry: Geometry, granule: int) -> int:
    """Bytes of granules that are not full, about one a layer of each store."""
    stores = geometry.num_layers + 3 * len(geometry.layers_of(CSA_RATIO)) + len(geometry.layers_of(HCA_RATIO))
    return stores * granule

"""Switches for tests and bug hunts; both cost time and change no result.

SGLANG_DSV4_POISON=1  pools start full of NaN, and a slot or tail row is filled with NaN before its next owner.
SGLANG_DSV4_AUDIT=1   checksums every snapshot and page that the tree owns; a changed byte stops the server.
"""

from __future__ import annotations

from sglang_dsv4.switches import switched_on


def poison_enabled() -> bool:
    return switched_on("SGLANG_DSV4_POISON")


def audit_enabled() -> bool:
    return switched_on("SGLANG_DSV4_AUDIT")

"""Documents name things that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _tests() -> set[str]:
    names: set[str] = set()
    for path in (ROOT / "tests").rglob("*.py"):
        names |= set(re.findall(r"^ *def (test_\w+)", path.read_text(), re.M))
    return names


def test_every_test_named_against_a_fault_exists():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "faults.md").read_text()))
    assert len(named) > 40
    assert sorted(named - _tests()) == []


@pytest.mark.parametrize("document", ["README.md", "docs/design.md", "docs/faults.md", "kernels/README.md"])
def test_every_file_that_a_document_names_exists(document):
    text = (ROOT / document).read_text()
    named = set(re.findall(r"`((?:docs|tests|tools|bench|configs|kernels|sglang_dsv4)/[\w./]+\.\w+)`", text))
    named |= {f"sglang_dsv4/{n}" for n in re.findall(r"`((?:ops|cache|attention|models)/\w+\.py)`", text)}
    assert sorted(n for n in named if not (ROOT / n).exists()) == []

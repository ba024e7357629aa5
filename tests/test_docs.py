"""What the documents name exists."""

from __future__ import annotations

import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent


def test_every_invariant_names_tests_that_exist():
    """docs/memory.md: each row has its number in order, and tests that are there."""
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    defined = set(re.findall(r"^(?:async )?def (test_\w+)\(", sources, re.MULTILINE))
    rows = re.findall(r"^\| M(\d+) \|(.*)$", (ROOT / "docs/memory.md").read_text(), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, len(rows) + 1))
    assert len(rows) >= 15
    for number, row in rows:
        named = re.findall(r"`(test_\w+)`", row)
        assert named, f"M{number} names no test"
        assert set(named) <= defined, f"M{number} names {set(named) - defined}"

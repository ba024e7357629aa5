"""Huge pages under a backend's malloc, by what the kernel says of a real process."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from engine.supervisor.incarnation import TUNABLES_ENV, huge_pages
from tests.helpers import until

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
CHILD = """
kept = [bytes(60_000) for _ in range(1000)]
for line in open("/proc/self/smaps_rollup"):
    if line.startswith("AnonHugePages"):
        print(line.split()[1])
"""


def is_allowed() -> bool:
    return SETTING.exists() and "[never]" not in SETTING.read_text()


def huge_kib(environ: dict[str, str]) -> int:
    done = subprocess.run(
        [sys.executable, "-c", CHILD], env=environ, capture_output=True, text=True
    )
    return int(done.stdout)


@pytest.mark.skipif(not is_allowed(), reason="this kernel gives no transparent huge pages")
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="not the GNU C library")
def test_most_of_what_a_child_allocates_is_in_huge_pages():
    """Goal: the memory of a killed backend is given back in large pieces. Method: a child that
    takes 60 MB in pieces of 60 kB, again where the kernel had too few at that moment."""
    environ = {**os.environ, **huge_pages({})}
    until(lambda: huge_kib(environ) > 40 << 10, "most of it to be in huge pages")


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ("", "glibc.malloc.hugetlb=1"),
        ("glibc.malloc.arena_max=2", "glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=0", None),
        ("glibc.malloc.hugetlb=2:glibc.malloc.arena_max=2", None),
    ],
)
def test_what_the_user_has_tuned_stays(given: str, added: str | None):
    """Goal: no setting of theirs is lost. Method: every kind of a value."""
    environ = {TUNABLES_ENV: given} if given else {}
    wanted = {} if added is None else {TUNABLES_ENV: added}
    assert huge_pages(environ) == wanted

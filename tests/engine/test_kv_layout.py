"""The record of the KV cache's size: real flocks, real processes, and engines that disagree."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.supervisor.kv_layout import NAME, KvLayout
from plumbing.errors import UsageError
from tests.engine.pod import ROOT, Pod
from tests.helpers import until

SMALL, LARGE = 1 << 20, 3 << 20


@pytest.fixture
def layouts(tmp_path: Path) -> Iterator[Layouts]:
    made = Layouts(tmp_path)
    yield made
    made.close()


class Layouts:
    """Several engines' parts; each has a file description of its own, as processes have."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / NAME
        self._all: list[KvLayout] = []

    def of(self, engine: str, *, may_change: bool = False) -> KvLayout:
        self._all.append(KvLayout(str(self.path.parent), engine, may_change=may_change))
        return self._all[-1]

    def close(self) -> None:
        for each in self._all:
            each.close()


def test_same_size_is_agreed_and_another_is_refused_with_both(layouts: Layouts):
    """Three engines, the third of another size, the fourth of other ranks: the sentence names who
    said what, and the way out; the two that agreed go on."""
    for engine in ("engine-0", "engine-1"):
        assert layouts.of(engine).agree(SMALL, 2) is None
    for wrong in ((LARGE, 2), (SMALL, 1)):
        with pytest.raises(UsageError, match=r"engine\.kv_differs") as caught:
            layouts.of("engine-2").agree(*wrong)
        for words in (
            "engine-2 has",
            "set by engine-0",
            f"{SMALL} bytes on 2 ranks",
            "--kv-change",
        ):
            assert words in caught.value.message
        assert f"{wrong[0]} bytes on {wrong[1]} rank" in caught.value.message
    assert layouts.of("engine-2").agree(SMALL, 2) is None


def test_record_of_dead_engines_binds_no_one(layouts: Layouts):
    """SIGKILL the process that wrote it: the record is still there, and another size is taken."""
    program = f"""
from engine.supervisor.kv_layout import KvLayout
layout = KvLayout({str(layouts.path.parent)!r}, "engine-0", may_change=False)
print(layout.agree({SMALL}, 1) is None, flush=True)
input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"True\n"
        with pytest.raises(UsageError):
            layouts.of("engine-1").agree(LARGE, 1)
        other.kill()
    assert json.loads(layouts.path.read_text())["kv_bytes"] == SMALL
    assert layouts.of("engine-1").agree(LARGE, 1) is None


def test_change_that_is_meant_binds_those_that_come_later(layouts: Layouts):
    """--kv-change: allowed beside a living engine, and reported; later engines need no flag for
    the new size, and is refused with the old one."""
    assert layouts.of("engine-0").agree(SMALL, 1) is None
    changing = layouts.of("engine-1", may_change=True)
    assert changing.agree(LARGE, 1) is None
    assert changing.note is not None
    for words in (f"{LARGE} bytes on 1 rank here", f"{SMALL} bytes on 1 rank on engine-0"):
        assert words in changing.note
    later = layouts.of("engine-2")
    assert later.agree(LARGE, 1) is None
    assert later.note is None
    with pytest.raises(UsageError, match="set by engine-1"):
        layouts.of("engine-3").agree(SMALL, 1)


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"kv_bytes": "x"}', b"\xff" * 5000])
def test_damaged_record_stops_no_engine(layouts: Layouts, damage: bytes):
    """Any rubbish in the file of a living pod: nothing is compared, and that is said; the first
    engine of a pod writes over it."""
    first, second = layouts.of("engine-0"), layouts.of("engine-1")
    layouts.path.write_bytes(damage)
    assert first.agree(SMALL, 1) is None
    layouts.path.write_bytes(damage)
    assert second.agree(LARGE, 1) is None
    assert second.note is not None
    assert "is not valid" in second.note


RACER = """
import json, sys
from engine.supervisor.kv_layout import KvLayout
from plumbing.errors import UsageError
directory, engine, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
counts = dict.fromkeys(("agreed", "refused", "asked again", "wrong"), 0)
input()
for _ in range(ROUNDS):
    layout = KvLayout(directory, engine, may_change=False)
    try:
        agreed = layout.agree(size, 1) is None
        counts["agreed" if agreed else "asked again"] += 1
        if agreed:
            with open(f"{directory}/kv_layout.json") as file:
                counts["wrong"] += json.load(file)["kv_bytes"] != size
    except UsageError:
        counts["refused"] += 1
    layout.close()
print(json.dumps(counts))
"""


def test_engines_that_come_at_once_never_hold_to_two_sizes(tmp_path: Path):
    """Four processes of two sizes, thousands of times: a holder of a size finds it in the
    record for as long as it holds. (The kernel lets go between two kinds of lock.)"""
    program = RACER.replace("ROUNDS", "3000")
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path), f"engine-{n}", str(1024 << n % 2)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        for n in range(4)
    ]
    for each in racers:
        assert each.stdin is not None
        each.stdin.write(b"go\n")
        each.stdin.flush()
    said = [json.loads(each.communicate()[0]) for each in racers]
    totals = {name: sum(counts[name] for counts in said) for name in said[0]}
    assert totals["wrong"] == 0
    assert totals["agreed"] > 0


# ---------------------------------------------------------------------- whole engines


def test_engine_waits_visibly_for_a_writer_that_was_stopped(pod: Pod):
    """Somebody holds the record exclusively: the engine stays in init and says why, and goes on
    when it is let go."""
    pod.start_lock()
    with open(pod.directory / NAME, "a+b") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        engine = pod.engine("engine-0")

        def reason() -> str:
            document = engine.status()
            return document["engine"]["reason"] if document else ""

        until(lambda: NAME in reason(), "the engine to say what it waits for")
        assert engine.state == "init"
    engine.until("active")

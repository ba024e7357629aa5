"""CPU pressure, from files that the test writes."""

from __future__ import annotations

import pytest

from plumbing.service.procfs import WINDOWS_MS, CpuPressure, candidates


def write(path, total_us):
    path.write_text(
        f"some avg10=1.00 avg60=2.00 avg300=3.00 total={total_us}\n"
        "full avg10=0.00 avg60=0.00 avg300=0.00 total=99\n"
    )


def feed(pressure, path, spans):
    """`spans`: milliseconds, and the share of them that is lost. What is said after each quarter of
    a second."""
    now_ms, total_us, said = 0.0, 5_000, []
    write(path, total_us)
    pressure.sample(now_ms)
    for length_ms, share in spans:
        for _ in range(int(length_ms / 250)):
            now_ms, total_us = now_ms + 250, total_us + int(250_000 * share)
            write(path, total_us)
            said.append(pressure.sample(now_ms))
    return said


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "cpu.pressure"
    write(path, 0)
    return path


def test_pressure_is_seen_soon_and_remembered_for_ten_seconds(file):
    """A quiet minute, then a busy one: it is said after the short window; and what ends is not
    forgotten before the long one has passed."""
    said = feed(CpuPressure([str(file)]), file, [(60_000, 0.0), (60_000, 1.0), (60_000, 0.0)])
    begins, ends = 240, 480
    assert max(said[:begins]) == 0
    assert said[begins + int(WINDOWS_MS[0] / 250) - 1] == pytest.approx(1.0)
    assert said[ends + int(WINDOWS_MS[1] / 500) - 1] == pytest.approx(0.5)
    assert said[ends + int(WINDOWS_MS[1] / 250)] == 0


def test_samples_do_not_grow(file):
    """A thousand samples of four minutes, each taken twice: ten seconds of them are kept."""
    pressure = CpuPressure([str(file)])
    for now in range(0, 250_000, 250):
        pressure.sample(now)
        pressure.sample(now + 1)
    assert len(pressure._samples) <= WINDOWS_MS[1] / 250 + 2


def test_first_file_that_can_be_read_counts(tmp_path, file):
    """Missing, not a pressure file, then the right one."""
    other = tmp_path / "other"
    other.write_text("nothing of the kind\n")
    pressure = CpuPressure([str(tmp_path / "missing"), str(other), str(file)])
    assert pressure.path == str(file)
    pressure.close()
    pressure.close()
    assert pressure.sample(1.0) is None


def test_file_that_becomes_unreadable_or_begins_again_is_unknown(file):
    """Truncated, then a smaller total: unknown, until two samples can be compared again."""
    pressure = CpuPressure([str(file)])
    feed(pressure, file, [(5_000, 1.0)])
    file.write_text("")
    assert pressure.sample(6_000) is None
    for now, total, share in ((7_000, 1000, None), (8_000, 501_000, 0.5), (9_000, 10, None)):
        write(file, total)
        found = pressure.sample(now)
        assert found is None if share is None else found == pytest.approx(share)


def test_own_group_comes_first(tmp_path):
    """Version 2's line names the group; version 1's lines do not matter."""
    membership = tmp_path / "cgroup"
    membership.write_text("9:name=systemd:/x\n4:memory:/y\n0::/pods/a\n")
    assert candidates(str(membership)) == [
        "/sys/fs/cgroup/pods/a/cpu.pressure",
        "/sys/fs/cgroup/unified/pods/a/cpu.pressure",
        "/proc/pressure/cpu",
    ]
    membership.write_text("0::/\n")
    assert candidates(str(membership))[0] == "/sys/fs/cgroup/cpu.pressure"
    assert candidates(str(tmp_path / "missing")) == ["/proc/pressure/cpu"]

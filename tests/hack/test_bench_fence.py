"""What the bench of fences says of its kills, also of fewer than were asked for."""

from __future__ import annotations

from hack.bench_fence.pods import GMS, OWN, Figures, document


def test_pairs_of_an_interrupted_run_are_compared_and_it_says_so():
    """Goal: no kill counts without its partner, and no part of a run passes for a whole one."""
    with_gms = Figures([40.0, 44.0, 90.0], [9.0, 9.0, 9.0], [4000] * 3, [1535] * 3)
    own = Figures([50.0, 43.0], [8.0, 8.0], [4000] * 2, [0, 0])
    found = document(3072, 12, {GMS: with_gms, OWN: own}, "interrupted")
    assert (found["is_complete"], found["problem"]) == (False, "interrupted")
    assert (found["pairs"], found["pairs_shorter"], found["is_shorter"]) == (2, 1, True)
    assert found["modes"][GMS]["fence_ms"]["each"] == [40.0, 44.0, 90.0]
    assert [found["modes"][mode]["kills"] for mode in (GMS, OWN)] == [3, 2]


def test_run_without_a_kill_has_no_figures():
    found = document(3072, 12, {GMS: Figures(), OWN: Figures()}, "interrupted")
    assert (found["pairs"], found["is_shorter"]) == (0, False)
    assert found["modes"][OWN]["wake_ms"] is None

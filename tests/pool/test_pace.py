"""Goal: what follows from a word is said at once, and words that never end come evenly spaced."""

from itertools import pairwise

import pytest

from pool.client.link import AHEAD, DEMAND_S, DemandPace


def said_at(pace, wanted_s):
    """When a word that is wanted at `wanted_s` is said."""
    at_s = pace.next_s(wanted_s)
    pace.said(at_s)
    return at_s


def test_words_of_one_switch_wait_for_nothing():
    pace = DemandPace()
    wanted = [10.0, 10.001, 10.002, 10.003, 11.0, 11.001]
    assert [said_at(pace, each) for each in wanted] == wanted


def test_words_without_end_are_evenly_spaced():
    pace, times = DemandPace(), [10.0]
    for _ in range(100):
        times.append(said_at(pace, times[-1]))
    assert times[AHEAD] == pytest.approx(10.0)
    gaps = [later - sooner for sooner, later in pairwise(times[AHEAD + 1 :])]
    assert gaps == [pytest.approx(DEMAND_S)] * len(gaps)

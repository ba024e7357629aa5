"""Loading weights: when the loader lock is wanted, and which ranks may load."""

from __future__ import annotations

from engine.core.loading import Loading, Role


def test_one_rank_wants_the_loader_until_it_is_attached():
    """Ask, get the lock, attach: `loader` is wanted exactly in between."""
    loading = Loading(Role.AUTO)
    assert not loading.wants_loader
    assert loading.asked(0, 1) == []
    assert loading.wants_loader
    assert loading.is_waiting
    assert loading.granted(5) == [0]
    assert (loading.mode, loading.token, loading.is_waiting) == ("rw_or_ro", 5, False)
    assert loading.attached(0, {"model": "m"}) is None
    assert not loading.wants_loader
    assert loading.token == 0


def test_late_grant_is_ignored():
    """A grant that arrives when nothing is wanted permits no rank, neither now nor later."""
    loading = Loading(Role.AUTO)
    assert loading.granted(5) == []
    assert loading.asked(0, 1) == []


def test_no_backend_is_prepared_while_a_rank_has_no_weights():
    """All or nothing: one of three ranks attached, then two, then all. A shadow may only read, so
    it waits for no lock."""
    loading = Loading(Role.SHADOW)
    assert loading.missing is None  # a backend may have no weights of this kind at all
    assert loading.asked(0, 3) == [0]
    assert (loading.mode, loading.token, loading.wants_loader) == ("ro", 0, False)
    loading.attached(0, {"model": "m"})
    assert loading.missing == "of 3 ranks, 1, 2 attached no weights"
    loading.attached(2, {"model": "m"})
    assert loading.missing == "of 3 ranks, 1 attached no weights"
    loading.attached(1, {"model": "m"})
    assert loading.missing is None

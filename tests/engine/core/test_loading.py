"""Loading weights: when the loader lock is wanted, and which ranks may load."""

from __future__ import annotations

from engine.core.loading import Loading, Role


def test_one_rank_wants_the_loader_until_it_is_attached():
    """Ask, get the lock, attach: `loader` is wanted exactly in between."""
    loading = Loading(Role.AUTO)
    assert not loading.wants_loader
    loading.asked(1)
    assert not loading.is_permitted(has_loader=False)
    assert loading.wants_loader
    assert loading.is_permitted(has_loader=True)
    assert loading.mode == "rw_or_ro"
    assert loading.attached(0, {"model": "m"}) is None
    assert not loading.wants_loader


def test_no_backend_is_prepared_while_a_rank_has_no_weights():
    """All or nothing: one of three ranks attached, then two, then all. A shadow may only read, so
    it waits for no lock."""
    loading = Loading(Role.SHADOW)
    assert loading.missing is None  # a backend may have no weights of this kind at all
    loading.asked(3)
    assert loading.is_permitted(has_loader=False)
    assert (loading.mode, loading.wants_loader) == ("ro", False)
    loading.attached(0, {"model": "m"})
    assert loading.missing == "of 3 ranks, 1, 2 attached no weights"
    loading.attached(2, {"model": "m"})
    assert loading.missing == "of 3 ranks, 1 attached no weights"
    loading.attached(1, {"model": "m"})
    assert loading.missing is None

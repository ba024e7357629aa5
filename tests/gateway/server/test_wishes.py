"""Which model a request is for, and what its client asks of the pool."""

from __future__ import annotations

import math

import pytest

from gateway.server.endpoints import BadWish, Router, first_of, keep_alive_ms, priority
from gateway.server.requests import model_in_path


def test_the_first_name_that_is_there_counts_and_a_single_model_need_not_be_named():
    router = Router({"chat": ("gpt-4o-mini", "coder"), "coder": ()})
    assert router.find(None, "coder", "chat") == ("coder", "coder")  # its name, not an alias
    assert router.find("gpt-4o-mini", "", "") == ("chat", "gpt-4o-mini")
    assert router.find("other", "chat", "") == ("", "other")  # the body says which one
    assert router.find(["chat"], None, "") == ("", "")
    assert Router({"chat": ()}).find(None, "", "") == ("chat", "")
    assert Router({"chat": ()}).find("other") == ("", "other")


def test_a_path_names_a_model():
    assert model_in_path("/m/chat/v1/models?x=/") == ("chat", "/v1/models?x=/")
    assert model_in_path("/m/a%2Fb?x") == ("a%2Fb", "/?x")
    assert model_in_path("/m//v1") == ("", "/v1")
    for other in ("/v1/m/chat", "*"):
        assert model_in_path(other) == ("", other)


def test_wishes_are_read_as_ollama_writes_them():
    """Method: a number is in seconds, less than nothing is for ever; the first that is there
    counts."""
    wanted = {0: 0.0, "1.5h": 5.4e6, "250ms": 250.0, 90: 9e4, " 0 ": 0.0, "-0": 0.0}
    assert {said: first_of(keep_alive_ms, said, "5m") for said in wanted} == wanted
    assert keep_alive_ms(-1) == keep_alive_ms("-1s") == math.inf
    assert (first_of(keep_alive_ms, None, "5m"), first_of(keep_alive_ms, None, None)) == (
        300_000.0,
        None,
    )
    assert keep_alive_ms(10**400) == 1e15
    assert [first_of(priority, *said) for said in ((0, "3"), (None, "-2"), (10**9,))] == [
        0,
        -2,
        1000,
    ]
    assert first_of(priority, None, None) is None


@pytest.mark.parametrize("read", [keep_alive_ms, priority])
@pytest.mark.parametrize("said", ["soon", "", "5 minutes", "1h30m", "9" * 5000, True, [1], {}])
def test_a_wish_that_cannot_be_read_is_refused_wherever_it_stands(read, said):
    for both in ((said, "5"), (None, said), (5, said)):
        with pytest.raises(BadWish):
            first_of(read, *both)

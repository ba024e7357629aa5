"""Which model a request is for, and what its client asks of the pool."""

from __future__ import annotations

import math

import pytest

from gateway.core.router import BadWish, Router, keep_alive_ms, model_in_path, priority_of, wait_ms

ROUTER = Router({"chat": ("gpt-4o-mini",), "coder": ()})


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (("chat", "", ""), ("chat", "chat")),
        (("gpt-4o-mini", "", ""), ("chat", "gpt-4o-mini")),
        ((None, "coder", "chat"), ("coder", "coder")),
        (("", "", "chat"), ("chat", "chat")),
        (("other", "chat", ""), ("", "other")),  # the body says which one, and it is not here
        ((["chat"], None, ""), ("", "")),
        ((), ("", "")),
    ],
)
def test_the_first_name_counts(names, found):
    assert ROUTER.find(*names) == found


def test_a_single_model_need_not_be_named():
    router = Router({"chat": ()})
    assert router.find(None, "", "") == ("chat", "")
    assert router.find("other") == ("", "other")


def test_a_model_is_found_by_its_name_though_another_one_has_it_as_an_alias():
    assert Router({"a": ("b",), "b": ()}).find("b") == ("b", "b")


@pytest.mark.parametrize(
    ("target", "found"),
    [
        ("/m/chat/v1/models?x=/", ("chat", "/v1/models?x=/")),
        ("/m/chat", ("chat", "/")),
        ("/m/chat?x", ("chat", "/?x")),
        ("/m/a%2Fb/v1", ("a%2Fb", "/v1")),
        ("/m//v1", ("", "/v1")),
        ("/v1/m/chat", ("", "/v1/m/chat")),
        ("*", ("", "*")),
    ],
)
def test_a_path_names_a_model(target, found):
    assert model_in_path(target) == found


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ((None, None), None),
        ((0, "5m"), 0.0),
        ((None, "5m"), 300_000.0),
        (("1.5h",), 5_400_000.0),
        (("250ms",), 250.0),
        ((90,), 90_000.0),
        ((-1,), math.inf),
        (("-1s",), math.inf),
        (("1h30m",), 5_400_000.0),
        ((" 0 ",), 0.0),
        ((0.5,), 500.0),
        (("-0",), 0.0),
        ((10**400,), 1e15),
    ],
)
def test_keep_alive_is_read_as_ollama_does(said, found):
    assert keep_alive_ms(*said) == found


@pytest.mark.parametrize(
    "said", [*("soon", "", "5 minutes", "1h30", "x" * 400, "9" * 400, "١s"), True, [1], {}]
)
def test_keep_alive_that_nobody_can_read_is_refused_wherever_it_stands(said):
    for both in ((said, "5m"), (None, said), (5, said)):
        with pytest.raises(BadWish):
            keep_alive_ms(*both)


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ((None, "3"), 3),
        ((0, "3"), 0),
        ((None, "-2"), -2),
        ((10**9,), 1000),
        ((None, None), None),
    ],
)
def test_priority(said, found):
    assert priority_of(*said) == found


@pytest.mark.parametrize("said", ["high", "", "1.5", 1.5, math.inf, True, [1], "9" * 5000])
def test_priority_that_is_no_whole_number_is_refused(said):
    for both in ((said, "3"), (None, said)):
        with pytest.raises(BadWish):
            priority_of(*both)


@pytest.mark.parametrize(
    ("prefer", "found"),
    [
        ("wait=20", 20_000.0),
        ("respond-async, wait=5; x=1", 5_000.0),
        ('Wait = "7"', 7_000.0),
        ("", math.inf),
        ("await=5", math.inf),
        ("wait=soon", math.inf),
    ],
)
def test_prefer_wait(prefer, found):
    assert wait_ms(prefer) == found

"""One small GET: what nobody can answer is an answer, too."""

from __future__ import annotations

import asyncio

import pytest

from understudy.http_get import get


@pytest.mark.parametrize("url", ["http://[::/live", "http://127.0.0.1:70000/", "http://a b:1/"])
def test_invalid_address_is_an_answer(url: str):
    """Goal: a probe of a manifest ends no task of the pod. Method: addresses that nothing has."""
    answer = asyncio.run(get(url))
    assert answer.status == 0
    assert answer.summary()

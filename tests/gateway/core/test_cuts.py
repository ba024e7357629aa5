"""Goal: a stream that is cut anywhere, however often, is the stream of an uninterrupted run.

Method: a model whose every token depends on all earlier ones, events merged at random, and clients
that read the bytes as real ones do.
"""

from __future__ import annotations

import itertools
import random

import pytest

from tests.gateway.core.model import KINDS
from tests.gateway.core.pod import Pod, Upstream

TOKENS = 14


def cut_stream(seed: int, kind: str, cuts, act, **options) -> Pod:
    """`act` once the nth group of all has been delivered, for each n of `cuts`."""
    pod, count = Pod(seed, **options), itertools.count(1)
    pod.on_group = lambda upstream: act(pod, upstream) if next(count) in cuts else None
    pod.grant()
    pod.ask(kind, TOKENS, prompt=f"prompt {seed % 3}")
    pod.run()
    return pod


def kill(pod: Pod, upstream: Upstream) -> None:
    pod.kill()


def break_only(pod: Pod, upstream: Upstream) -> None:
    """The connection breaks, the engine lives."""
    if upstream.attempt in pod.upstreams:
        pod.break_off(upstream)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fixes_ids", [False, True])
def test_stream_cut_at_every_group_is_whole(kind, fixes_ids):
    """Goal: every cut point, of a death and of a connection. Method: each group of each run."""
    for cut in range(1, TOKENS + 4):
        for act in (kill, break_only):
            pod = cut_stream(cut, kind, [cut], act, fixes_ids=fixes_ids)
            pod.clients[1].check_whole()


@pytest.mark.parametrize("kind", KINDS)
def test_stream_cut_many_times_is_whole(kind):
    """Goal: deaths in a row, deaths during a replay, breaks and refusals among them. Method: random
    cuts, fewer than three without progress at the same engine."""
    for seed in range(40):
        rng = random.Random(seed)
        cuts = sorted(rng.sample(range(1, 30), rng.choice((2, 2, 3))))

        def act(pod, upstream, rng=rng):
            pod.refusals = rng.choice((0, 0, 1, 3))
            pod.tells_breaks = rng.random() < 0.7
            # Two deaths only: a third one without 32 tokens would make it the poison.
            if pod.deaths < 2 and rng.random() < 0.7:
                pod.kill(rng.choice((5.0, 60.0, 900.0)))
            else:
                break_only(pod, upstream)

        pod = cut_stream(seed, kind, cuts, act)
        pod.clients[1].check_whole()
        assert pod.gateway.shared.memory_bytes == 0
        assert pod.gateway.attempts == {}


def test_replay_that_says_something_else_ends_with_an_error():
    """The next engine says something else for the same tokens."""
    pod = Pod(2)
    pod.misspells = True
    pod.grant()
    client = pod.ask("chat", 40)
    pod.at(50.0, pod.kill)
    pod.run()
    assert (client.outcome, client.ending.code) == ("aborted", "gateway.replay_mismatch")
    assert (client.answer.ends, len(client.answer.errors)) == (0, 1)

"""Goal: vLLM takes up a request from the tokens already made, and the answer is the same.

Method: a real engine behind the backend's gate for each of vLLM's model runners, asked as a gateway
asks, in float32; some cuts of the matrix of `tests/vllm/resume_matrix`, and what it has no row for.
Then a second engine, for another pod: some cuts of `tests/vllm/fleet_cuts`.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from http.client import IncompleteRead
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from hack import v2_on_cpu
from plumbing import gateway_protocol as hop
from plumbing.gateway_protocol import Journal
from tests.vllm import fleet_cuts
from tests.vllm.resume_matrix.__main__ import try_rows
from tests.vllm.resume_matrix.client import Engine, running_engine
from tests.vllm.resume_matrix.rows import all_rows

KINDS = all_rows([65] * 40, "x" * 40)  # by name; what they ask follows from the first answer
ROWS = [name for name, row in KINDS.items() if row.is_resumed]
# As long as vLLM has its old runner.
V1_ROWS = ROWS[:20] if find_spec("vllm.v1.worker.gpu_model_runner") else []
CUTS = {"v2": 2, "v1": 1}  # of each row; `make test-vllm-full` tries all
FLEET_CUTS = [(0, 0), (1, 40), (fleet_cuts.TOKENS // 2, 0), (fleet_cuts.TOKENS, 40)]
AT_ONCE = 40
ASKED = {"model": "m", "prompt": "hello", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
STREAM = {**ASKED, "stream": True}
WAIT_S = 120.0


@pytest.fixture(scope="module")
def made_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By the first engine. Answers have a fingerprint, of where the model is, too."""
    return tmp_path_factory.mktemp("vllm") / "model"


@pytest.fixture(scope="module")
def engine(made_model: Path) -> Iterator[Engine]:
    """With the runner of all tests."""
    with running_engine((), {}, made_model) as found:
        yield found


@pytest.fixture(scope="module")
def report(engine: Engine) -> Any:
    return try_rows(engine.path, at_once=AT_ONCE, cuts_max=CUTS["v2"])


@pytest.fixture(scope="module")
def report_of_v1() -> Any:
    """With two ranks, which cost little with V1: each takes the tokens up."""
    flags = ("--tensor-parallel-size=2",)
    with running_engine(flags, v2_on_cpu.RUNNERS["v1"]) as found:
        return try_rows(found.path, names=V1_ROWS, at_once=AT_ONCE, cuts_max=CUTS["v1"])


@pytest.mark.parametrize("row", ROWS)
def test_an_answer_that_was_cut_is_resumed_as_it_would_have_gone_on(row: str, report: Any):
    """Cut in two places, one of which leaves a single token to compute behind whole blocks: texts,
    finish and usage equal the uninterrupted answer's, and so does what a client sees that has the
    first part already."""
    assert report[row]["class"] == "state"
    assert len(report[row]["cuts"]) == CUTS["v2"]
    assert report[row]["wrong"] == {}


@pytest.mark.parametrize("row", V1_ROWS)
def test_an_answer_that_was_cut_is_resumed_by_the_old_runner(row: str, report_of_v1: Any):
    assert report_of_v1[row]["class"] == "state"
    assert len(report_of_v1[row]["cuts"]) == CUTS["v1"]
    assert report_of_v1[row]["wrong"] == {}


def test_every_kind_of_request_is_tried(report: Any):
    """And one whose class is none."""
    assert len(ROWS) >= 29
    assert list(report) == [*KINDS]
    assert {report[row]["class"] for row in set(KINDS) - set(ROWS)} == {"none"}


@pytest.mark.parametrize(
    "about",
    [{"n": 2, "temperature": 1}, {"prompt": ["one", "two"]}],
    ids=["n", "prompts"],
)
def test_what_cannot_be_resumed_says_so(engine: Engine, about: Any):
    """Plain events of class none; and a journal for such a request is refused."""
    body = {**STREAM, **about}
    found = engine.ask(body)
    assert (found.status, found.continuation) == (200, "none")
    assert b": u=" not in found.body
    assert b": end" not in found.body
    assert engine.ask(body, Journal([65], [1])).status == 409


@pytest.mark.parametrize("value", [[65, 66, 67], "AAAABBBB", 65])
def test_a_client_cannot_make_up_output(engine: Engine, value: Any):
    """What it sets under our name changes nothing."""

    def text_of(body: Any) -> Any:
        return json.loads(engine.ask(body).body)["choices"][0]["text"]

    assert text_of({**ASKED, "vllm_xargs": {"understudy_made": value}}) == text_of(ASKED)


@pytest.mark.parametrize(
    ("more", "journal"),
    [
        ({}, Journal([1 << 30], [1])),
        (
            # The prompt ends a thought: behind it the grammar begins.
            {"prompt": [104, 261], "structured_outputs": {"choice": ["yes", "no"]}},
            Journal([65, 66], [2]),
        ),
    ],
    ids=["no token of the model", "against the grammar"],
)
def test_a_journal_that_cannot_be_is_an_error_of_one_request(
    engine: Engine, more: Any, journal: Journal
):
    """It gets no token and no end, and the next request is answered."""
    found = engine.ask({**STREAM, **more}, journal)
    assert b"error" in found.body
    assert b": end" not in found.body
    assert engine.ask(STREAM).is_whole


@pytest.fixture(scope="module")
def other_engine(made_model: Path) -> Iterator[Engine]:
    with running_engine((), {}, made_model) as found:
        yield found


@pytest.mark.parametrize("row", fleet_cuts.ROWS)
async def test_a_stream_whose_pod_is_killed_goes_on_in_another_one(
    row: str, engine: Engine, other_engine: Engine, tmp_path_factory: pytest.TempPathFactory
):
    """As it would have gone on in the one that was killed; greedy and with a seed."""
    base, paths = tmp_path_factory.mktemp("f"), (engine.path, other_engine.path)
    assert await fleet_cuts.try_row(base, paths, fleet_cuts.ROWS[row], FLEET_CUTS) == {}


def test_a_handover_cuts_streams_behind_a_whole_group(engine: Engine):
    """The last one, since it ends the engine's service: a drain in the middle of a long stream."""
    long = {**STREAM, "max_tokens": 900}
    with engine.begin(long) as response:
        text = response.read1()
        began = time.monotonic()
        engine.say("drain", "drained")
        assert time.monotonic() - began < WAIT_S
        with contextlib.suppress(IncompleteRead):  # how it notices that the connection was closed
            while more := response.read1():
                text += more
    assert text.endswith(hop.HANDED_OVER)
    last = text.removesuffix(b"\n\n" + hop.HANDED_OVER).rpartition(b"\n\n")[2]
    assert hop.read_group_end(last)[0]
    assert text.count(b": u=") < 900

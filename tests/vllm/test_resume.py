"""Goal: vLLM takes up a request from the tokens already made, and the answer is the same.

Method: a real engine behind the backend's gate for each of vLLM's model runners, asked as a gateway
asks, in float32; some cuts of the matrix of `tests/vllm/resume_matrix`, and what it has no row for.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, IncompleteRead
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from hack import v2_on_cpu
from plumbing import gateway_protocol as hop
from plumbing.gateway_protocol import Journal

ROOT = str(Path(__file__).parents[2])
ROWS = (
    *("penalties", "min tokens", "stop string", "stop string, included", "stop token"),
    *("stop string after min tokens", "bad words", "logit bias", "end of text"),
    *("logprobs, usage in each event", "seed", "seed, top k and p", "seed, min p"),
    *("seed, top k alone", "half characters"),
    *("characters of several tokens", "JSON schema", "regular expression", "choice"),
    *("seed, penalty and expression", "model's length", "one token", "echo", "reasoning"),
    *("reasoning, then JSON", "tool call", "named tool", "messages", "responses"),
)
NOT_RESUMED = ("two answers",)
# As long as vLLM has its old runner.
V1_ROWS = ROWS[:20] if find_spec("vllm.v1.worker.gpu_model_runner") else ()
CUTS = {"v2": 2, "v1": 1}  # of each row; `make test-vllm-full` tries all
AT_ONCE = 40
ASKED = {"model": "m", "prompt": "hello", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
STREAM = {**ASKED, "stream": True}
WAIT_S = 120.0


class Connection(HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("engine", timeout=WAIT_S)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(WAIT_S)
        self.sock.connect(self.path)


@dataclass
class Engine:
    process: subprocess.Popen[str]
    path: str

    def say(self, word: str, answer: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        self.wait_for(answer)

    def wait_for(self, word: str) -> None:
        assert self.process.stdout is not None
        assert any(line.strip() == word for line in self.process.stdout), "the engine ended"

    @contextlib.contextmanager
    def begin(self, body: Any, journal: Journal | None = None) -> Iterator[Any]:
        """The response, of which nothing was read."""
        headers = {hop.GATEWAY: "1", "Content-Type": "application/json"}
        content = json.dumps(body).encode()
        if journal is not None:
            content, headers[hop.JOURNAL] = hop.with_journal(content, journal)
        with contextlib.closing(Connection(self.path)) as connection:
            connection.request("POST", "/v1/completions", content, headers)
            with connection.getresponse() as response:
                yield response

    def ask(self, body: Any, journal: Journal | None = None) -> tuple[int, str, bytes]:
        """Status, class and text."""
        with self.begin(body, journal) as response:
            return response.status, response.getheader(hop.CONTINUATION), response.read()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """With the runner of all tests."""
    with running(tmp_path_factory.mktemp("r"), {}) as found:
        yield found


@contextlib.contextmanager
def running(base: Path, env: Mapping[str, str], *flags: str) -> Iterator[Engine]:
    path = f"{base}/engine.sock"
    command = [
        sys.executable,
        "-m",
        "tests.vllm.resume_matrix.engine",
        f"{base}/model",
        path,
        *flags,
    ]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        found = Engine(process, path)
        try:
            found.wait_for("ready")
            yield found
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # vLLM's processes would outlive it


@pytest.fixture(scope="module")
def report(engine: Engine) -> Any:
    return matrix(engine, CUTS["v2"])


@pytest.fixture(scope="module")
def report_of_v1(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """With two ranks, which cost little with V1: each takes the tokens up."""
    v1 = v2_on_cpu.RUNNERS["v1"]
    with running(tmp_path_factory.mktemp("r1"), v1, "--tensor-parallel-size=2") as engine:
        return matrix(engine, CUTS["v1"], *V1_ROWS)


def matrix(engine: Engine, cuts: int, *rows: str) -> Any:
    command = [
        sys.executable,
        "-m",
        "tests.vllm.resume_matrix",
        "--socket",
        engine.path,
        "--json",
        "-",
    ]
    command += [f"--cuts={cuts}", f"--at-once={AT_ONCE}", *(f"--row={row}" for row in rows)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    return json.loads(done.stdout)["rows"]


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


def test_every_kind_of_request_is_known(report: Any):
    """And one whose class is none."""
    assert sorted(report) == sorted([*ROWS, *NOT_RESUMED])
    assert {report[row]["class"] for row in NOT_RESUMED} == {"none"}


@pytest.mark.parametrize(
    "about",
    [{"n": 2, "temperature": 1}, {"prompt": ["one", "two"]}],
    ids=["n", "prompts"],
)
def test_what_cannot_be_resumed_says_so(engine: Engine, about: Any):
    """Plain events of class none; and a journal for such a request is refused."""
    body = {**STREAM, **about}
    status, continuation, text = engine.ask(body)
    assert (status, continuation) == (200, "none")
    assert b": u=" not in text
    assert b": end" not in text
    assert engine.ask(body, Journal([65], [1]))[0] == 409


@pytest.mark.parametrize("value", [[65, 66, 67], "AAAABBBB", 65])
def test_a_client_cannot_make_up_output(engine: Engine, value: Any):
    """What it sets under our name changes nothing."""
    expected = json.loads(engine.ask(ASKED)[2])["choices"][0]["text"]
    _, _, text = engine.ask({**ASKED, "vllm_xargs": {"understudy_made": value}})
    assert json.loads(text)["choices"][0]["text"] == expected


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
    _, _, text = engine.ask({**STREAM, **more}, journal)
    assert b"error" in text
    assert b": end" not in text
    assert engine.ask(STREAM)[2].endswith(hop.END)


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

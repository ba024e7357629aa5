"""Answers learnt elsewhere: the file, and a drill that is measured by it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from plumbing.errors import UsageError
from tests.understudy.drill.fake_pod import FakePod
from understudy.drill.clients import Target
from understudy.drill.prompts import all_prompts, learn_answers, read_expected, write_expected
from understudy.drill.run import DrillPlan
from understudy.drill.verdict import DrillReport
from understudy.status.gather import gather
from understudy.up import sessions


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "pod"
    made.mkdir(mode=0o700)
    return made


def drill_by_the_file(directory: Path, file: Path, *, is_changed: bool) -> DrillReport:
    """One kill, compared with what the pod itself said before, or with other words."""

    async def main() -> DrillReport:
        async with FakePod(directory):
            await write_answers(directory, file, is_changed=is_changed)
            plan = DrillPlan(kills=1, targets=("backend-http",), clients=2, expected=file)
            result = await sessions.drill_running_pod(directory, plan, lambda line: None)
            assert result is not None
            return result.report

    return asyncio.run(main())


async def write_answers(directory: Path, file: Path, *, is_changed: bool) -> None:
    address = (await gather(directory))["lockserver"]["service"]["active"]["address"]
    host, _, port = address.rpartition(":")
    target = Target(host, int(port))
    prompts, answers = await learn_answers(target, all_prompts("another name for the model"))
    for answer in answers.values() if is_changed else ():
        answer.text = "?" + answer.text[1:]
    write_expected(file, prompts, answers, source="a fake")


@pytest.mark.parametrize("is_changed", [False, True])
def test_drill_compares_with_the_file_and_not_with_the_pod(
    directory: Path, tmp_path: Path, is_changed: bool
):
    """Goal: an error that both engines make is found. Method: a file with this pod's answers, and
    one with another letter in each."""
    report = drill_by_the_file(directory, tmp_path / "answers.json", is_changed=is_changed)
    assert report.passed is not is_changed, report.problems
    assert (report["wrong_tokens"] > 0) is is_changed


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"prompts": [{"key": "a"}]}', '{"prompts": []}'])
def test_file_without_answers_is_refused_by_name(tmp_path: Path, text: str):
    """Goal: a sentence, not a drill that compares with nothing. Method: files of other things."""
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"other\.json") as caught:
        read_expected(path, "m")
    assert caught.value.code == "drill.bad_expected"
    with pytest.raises(UsageError, match="cannot read"):
        read_expected(tmp_path / "none.json", "m")


def test_prompts_are_asked_of_the_model_that_is_served(tmp_path: Path):
    """Goal: the same file for a model served under another name. Method: read for another."""
    body = {"prompt": "x", "max_tokens": 4}
    entry = {"key": "a", "path": "/v1/completions", "body": body, "text": "y"}
    path = tmp_path / "answers.json"
    path.write_text(json.dumps({"prompts": [{**entry, "finish_reason": "length"}]}))
    ((prompt,), answers) = read_expected(path, "served")
    assert prompt.body == {"model": "served", **body}
    assert (answers["a"].text, answers["a"].finish_reason) == ("y", "length")

"""Values as text: durations and sizes, and names that are not UTF-8."""

from __future__ import annotations

import json
import logging
import os
from datetime import UTC, datetime, timedelta

import pytest

from plumbing.pod.cli import Look, show_event, show_status
from plumbing.service.files import read_json, write_atomic
from plumbing.service.http import _json
from plumbing.service.log import JsonFormatter
from plumbing.text import duration, since, to_json

NAME = os.fsdecode(b"pod-\xff\xc3\xa9")


def test_every_document_is_utf8_although_a_name_is_not(tmp_path):
    """Goal: HTTP, logs and state files arrive; other text stays as it is. Method: each with such a
    name, read as UTF-8; JSON gives the name itself back."""
    document = {"dir": NAME, "a": "é→😀", "b": [1.5, None]}
    assert json.loads(to_json(document).encode()) == document
    assert json.loads(_json(document)[1]) == document
    record = logging.LogRecord("x", logging.INFO, "", 0, "serving %s", (NAME,), None)
    assert json.loads(JsonFormatter("x", {}).format(record).encode())["msg"] == f"serving {NAME}"
    write_atomic(str(tmp_path / "state.json"), document)
    assert read_json(str(tmp_path / "state.json")) == document


NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("ms", "text", "ago"),
    [
        (-5, "0 ms", "0s"),
        (999, "999 ms", "0s"),
        (2650, "2.6s", "2s"),
        (12_900, "12s", "12s"),
        (60_000, "1m00s", "1m00s"),
        (7_500_000, "2h05m", "2h05m"),
        (90_000_000, "1d1h", "1d1h"),
    ],
)
def test_durations_have_at_most_two_units_and_since_whole_seconds(ms: int, text: str, ago: str):
    assert duration(ms) == text
    assert since((NOW - timedelta(milliseconds=ms)).isoformat(), NOW) == ago


def test_what_a_process_says_of_itself_steers_no_terminal(capsys: pytest.CaptureFixture[str]):
    event = {"ts": "now", "source": "pod", "type": "a.b", "message": "x\x1b[2J\ny"}
    show_event(event, as_json=False)
    show_status(lambda: Look({}, "one\x9b\ntwo"), as_json=False)
    event_line, *status = capsys.readouterr().out.splitlines()
    assert event_line.endswith("x\\x1b[2J\\ny")
    assert status == ["one\\x9b", "two"]

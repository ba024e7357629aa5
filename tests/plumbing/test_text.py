"""Values as text: durations and sizes, and names that are not UTF-8."""

from __future__ import annotations

import io
import json
import logging
import os
from datetime import UTC, datetime, timedelta

import pytest

from plumbing.errors import UnderstudyError
from plumbing.service.files import read_json, write_atomic
from plumbing.service.http import _json
from plumbing.service.log import JsonFormatter
from plumbing.text import ERRORS, duration, encoded, printable, since, size, to_json
from plumbing.wire.messages import Catalogue, FaultMsg, fault_of

NAME = os.fsdecode(b"pod-\xff\xc3\xa9")
SHOWN = "pod-\\xffé"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("/run/understudy", "/run/understudy"),
        (NAME, SHOWN),
        ("\ud800", "\\ud800"),
        (
            {NAME: [NAME, {"a": NAME}, 1, None, True, b"\xff"]},
            {SHOWN: [SHOWN, {"a": SHOWN}, 1, None, True, b"\xff"]},
        ),
    ],
)
def test_text_is_printable_wherever_it_is(value, expected):
    assert printable(value) == expected


def test_text_that_is_utf8_stays_as_it_is():
    document = {"a": "é→😀", "b": [1.5, None]}
    assert json.loads(to_json(document)) == document
    assert encoded("é→😀").decode() == "é→😀"


def test_frame_with_such_a_name_is_sent_with_a_printable_one():
    """Goal: a status or an error that names a path arrives. Method: encode and decode."""
    catalogue = Catalogue()
    error = UnderstudyError("x.y", f"{NAME} is in use", path=NAME, more={"paths": (NAME,)})
    message, _ = catalogue.decode(catalogue.encode(fault_of(error), 3), 0)
    assert message == FaultMsg(
        "x.y", f"{SHOWN} is in use", {"path": SHOWN, "more": {"paths": [SHOWN]}}
    )


def test_every_json_document_shows_such_a_name(tmp_path):
    """Goal: HTTP, events, logs and state files. Method: each with such a name, read as UTF-8."""
    document = {"dir": NAME}
    assert json.loads(_json(document)[1]) == {"dir": SHOWN}
    record = logging.LogRecord("x", logging.INFO, "", 0, "serving %s", (NAME,), None)
    assert json.loads(JsonFormatter("x", {}).format(record).encode())["msg"] == f"serving {SHOWN}"
    write_atomic(str(tmp_path / "state.json"), document)
    assert read_json(str(tmp_path / "state.json")) == {"dir": SHOWN}


def test_stream_with_our_error_handler_prints_such_a_name():
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding="utf-8", errors=ERRORS) as stream:
        stream.write(NAME)
        stream.flush()
        assert raw.getvalue().decode() == SHOWN


NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0 ms"),
        (999, "999 ms"),
        (1000, "1s"),
        (2650, "2.6s"),
        (12_900, "12s"),
        (60_000, "1m00s"),
        (200_000, "3m20s"),
        (7_500_000, "2h05m"),
        (90_000_000, "1d1h"),
    ],
)
def test_duration_has_at_most_two_units(ms: int, text: str):
    """Goal: readable at a glance. Method: a table."""
    assert duration(ms) == text


@pytest.mark.parametrize(
    ("ago", "text"),
    [
        (timedelta(seconds=4), "4s"),
        (timedelta(minutes=3, seconds=2), "3m02s"),
        (timedelta(hours=3, minutes=12), "3h12m"),
        (timedelta(days=2, hours=5), "2d5h"),
        (timedelta(seconds=-5), "0s"),
    ],
)
def test_since_is_short_and_in_whole_units(ago, text):
    """Goal: short durations. Method: one per unit, and a clock that is ahead."""
    assert since((NOW - ago).isoformat(), NOW) == text


def test_since_and_size_of_nothing_are_a_dash():
    """Goal: a hole is shown as one. Method: values that are missing or broken."""
    assert (since(None, NOW), since("soon", NOW), size(None)) == ("-", "-", "-")
    assert (size(12), size(2048), size(3 * 2**20)) == ("12 B", "2.0 KiB", "3.0 MiB")

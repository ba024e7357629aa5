"""Goal: one record per transition, numbered, kept for a while, and told to everybody."""

import logging

import pytest

from plumbing.errors import InvariantError
from plumbing.service.events import EventLog
from tests.fake_clock import FakeClock


def make_log(ring_max=4):
    return EventLog("engine-1", FakeClock(start_ms=7.5), ring_max=ring_max)


def test_subscriber_that_raises_is_dropped_once_and_others_hear_on(caplog):
    """Goal: a listener's bug hides nothing; method: one that raises before one that listens."""
    log = make_log()
    heard = []

    def broken(event):
        raise RuntimeError("listener's bug")

    log.subscribe(broken)
    log.subscribe(lambda event: heard.append(event.id))
    with caplog.at_level(logging.ERROR):
        log.record("a.b", "one")
        log.record("a.b", "two")
    assert heard == [1, 2]
    assert [record.message for record in caplog.records] == [
        "a subscriber to events raised and was dropped"
    ]


def test_subscriber_that_finds_an_invariant_broken_is_not_silenced():
    """Goal: our own fault crashes; method: a subscriber raising InvariantError."""
    log = make_log()

    def checker(event):
        raise InvariantError("two active")

    log.subscribe(checker)
    with pytest.raises(InvariantError):
        log.record("a.b", "one")


def test_record_writes_one_log_line_with_event_and_id(caplog):
    """Goal: logs derive from the record; method: read the LogRecord's fields."""
    with caplog.at_level(logging.INFO):
        make_log().record("lock.granted", "granted to engine-1", data={"token": 3})
    (record,) = caplog.records
    assert record.getMessage() == "granted to engine-1"
    assert record.fields == {"event": "lock.granted", "event_id": 1, "token": 3}


def test_record_with_an_unknown_severity_changes_nothing():
    """Goal: an illegal call leaves no trace; method: record, then look."""
    log = make_log()
    with pytest.raises(KeyError):
        log.record("a.b", "x", severity="loud")
    assert log.last_id == 0
    assert log.kept_since(0) == []

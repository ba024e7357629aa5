"""One record per event, numbered and told to everybody; a log line is JSON for machines and aligned
text for people."""

from __future__ import annotations

import fcntl
import io
import json
import logging
import os

import pytest

from plumbing.errors import UsageError
from plumbing.service import log
from plumbing.service.log import NonBlockingHandler


@pytest.fixture(autouse=True)
def plain_logging(monkeypatch):
    """No settings from outside; the root logger is put back afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    monkeypatch.delenv("LOG_LEVEL", raising=False)
    monkeypatch.delenv("LOG_FORMAT", raising=False)
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_not_a_terminal_gives_one_json_object_per_line(capsys):
    """Goal: known keys on top, the rest under data; method: parse the line."""
    log.configure("engine", engine_id="engine-0")
    fields = {"event": "lock.granted", "event_id": 4, "token": 9, "lost_mono_ms": 1.5}
    logging.getLogger("x.y").info("granted %d", 9, extra={"fields": fields})
    line = json.loads(capsys.readouterr().err)
    assert line.pop("ts").endswith("Z")
    assert line == {
        "level": "info",
        "logger": "x.y",
        "msg": "granted 9",
        "component": "engine",
        "engine_id": "engine-0",
        "event": "lock.granted",
        "event_id": 4,
        "token": 9,
        "data": {"lost_mono_ms": 1.5},
    }


def test_text_names_component_event_and_fields(capsys, monkeypatch):
    """Goal: a person reads it; method: the text format, asked for by environment."""
    monkeypatch.setenv("LOG_FORMAT", "text")
    log.configure("lockserver")
    fields = {"event": "lock.free", "event_id": 1, "lock": "active", "token": None}
    logging.getLogger("x").warning("free", extra={"fields": fields})
    assert (
        capsys.readouterr().err[12:]
        == " WARNING lockserver lock.free          free (lock=active)\n"
    )


@pytest.mark.parametrize(("name", "wrong"), [("LOG_LEVEL", "loud"), ("LOG_FORMAT", "xml")])
def test_what_does_not_exist_is_a_usage_error(monkeypatch, name, wrong):
    """Goal: one sentence that names the choices; method: a wrong value each."""
    monkeypatch.setenv(name, wrong)
    with pytest.raises(UsageError, match="does not exist; use one of"):
        log.configure("x")


def test_line_that_nobody_reads_is_dropped_and_counted_and_never_waited_for():
    """Goal: who tells is not stopped by who listens; method: a pipe that is full in the middle of a
    long line, then read: the lines that were taken, what is left of one, and how many are lost."""
    reader, writer = os.pipe()
    with open(reader) as listening, open(writer, "w") as stream:
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 8192)
        handler = NonBlockingHandler(stream)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger = logging.Logger("x")
        logger.addHandler(handler)
        logger.info("first")
        for _ in range(3):
            logger.info("x" * 10_000)
        assert handler.dropped == 3
        os.set_blocking(reader, False)
        taken = os.read(reader, 100_000)
        assert taken.startswith(b"first\nxxx")
        assert not taken.endswith(b"\n")
        logger.info("last")
        lines = listening.read().splitlines()
    why = "because they were not read, or could not be written"
    assert lines == ["", f"3 log lines were dropped {why}", "last"]


def test_lines_that_a_full_disk_refuses_are_counted_and_nothing_waits_for_it(tmp_path, capsys):
    """Goal: an access log on a full disk costs its lines. Method: a stream on /dev/full, which is
    then one on a file."""
    raw = open("/dev/full", "wb", buffering=0)  # noqa: SIM115 - as stderr
    with io.TextIOWrapper(raw, write_through=True) as full:
        handler = NonBlockingHandler(full)
        for _ in range(3):
            handler.emit(logging.makeLogRecord({"msg": "lost"}))
        assert handler.dropped == 3
        with open(tmp_path / "log", "w") as file:
            os.dup2(file.fileno(), full.fileno())
        handler.emit(logging.makeLogRecord({"msg": "kept"}))
    notice, kept = (tmp_path / "log").read_text().splitlines()
    assert notice.startswith("3 log lines")
    assert kept == "kept"
    assert capsys.readouterr().err == ""

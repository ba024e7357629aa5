"""The command line, and how a start by hand fails: one sentence, an exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine.backends.reference.config import Settings, read_config
from engine.backends.reference.decoder import KVCache
from engine.backends.reference.kv_blocks import DEFAULT_CONTEXT, size_kv
from engine.backends.reference.main import parse
from plumbing.errors import UsageError
from tests.engine.reference_process.rig import COMMAND, DEADLINE_S


def test_arguments_have_defaults_and_sizes():
    """Goal: the documented flags. Method: the least and the most."""
    least, names = parse(["--model", "/models/tiny/"])
    assert (least.slots, least.max_context, least.kv_bytes, names) == (4, None, None, ("tiny",))
    most, names = parse(
        ["--model", "m", "--kv-bytes", "2GiB", "--slots", "8", "--served-model-name", "a", "b"]
    )
    assert (most.kv_bytes, most.slots, names) == (2 << 30, 8, ("a", "b"))


def test_help_of_the_backend_is_printed_and_nothing_is_started(tmp_path: Path):
    """Goal: a question is answered. Method: `engine run -- --help` in a place for no pod."""
    nowhere = tmp_path / "nowhere"
    program = (sys.executable, "-c", "from engine.cli import main; main()")
    done = subprocess.run(
        [*program, "run", "--backend", "reference", "--dir", str(nowhere), "--", "--help"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "--tensor-parallel" in done.stdout
    assert not nowhere.exists()


def test_context_is_what_was_asked_or_what_fits(model: Path):
    """Goal: the context's length never surprises, and the cache is as large as the slots. Method:
    a model of 2048 positions."""
    config = read_config(str(model))
    position_bytes = 2 * KVCache.bytes_needed(config, 4, 1)
    block_bytes = KVCache.bytes_needed(config, 1, 32)

    def context(max_context: int | None = None, kv_bytes: int | None = None) -> int:
        found = size_kv(config, Settings("dir", 4, max_context, kv_bytes))
        assert 0 <= found.context * position_bytes - found.kv_bytes < block_bytes
        assert kv_bytes is None or found.kv_bytes <= kv_bytes
        return found.context

    assert config.max_position == 2048 < DEFAULT_CONTEXT
    assert context() == 2048
    assert context(max_context=100) == 100
    assert context(kv_bytes=56 * position_bytes) == 56
    assert context(kv_bytes=56 * position_bytes - 1) == 55
    assert context(kv_bytes=1 << 40) == 2048
    for wrong in ((4096, None), (100, 50 * position_bytes), (None, position_bytes // 2)):
        with pytest.raises(UsageError):
            context(*wrong)
    for tokens, blocks in ((0, 0), (31, 0), (320, 10)):
        asked = Settings("dir", 4, 100, None, tokens)
        slots_bytes = 100 * position_bytes // 2
        assert size_kv(config, asked) == (
            100,
            blocks,
            slots_bytes,
            slots_bytes + blocks * block_bytes,
        )


def test_start_by_hand_names_the_command_to_use():
    """A backend without a supervisor is one sentence on stderr and exit code 2, no stack trace."""
    command = [*COMMAND, "--model", "m"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert ended.returncode == 2
    assert "engine run" in ended.stderr
    assert "Traceback" not in ended.stderr

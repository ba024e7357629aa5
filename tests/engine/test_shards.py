"""Files of a checkpoint that are no safetensors files."""

from __future__ import annotations

import pytest

from engine.backends.shards import FILE_SAMPLE_WINDOWS, SAMPLE_WINDOW_BYTES, sample_of
from plumbing.errors import UsageError

LARGE = 3 * FILE_SAMPLE_WINDOWS * SAMPLE_WINDOW_BYTES


def test_sample_tells_files_apart_by_size_and_bytes(tmp_path):
    """The last byte counts, and so does a length that no window sees; the same bytes are equal."""
    one, other = tmp_path / "one.bin", tmp_path / "other.bin"
    one.write_bytes(bytes(LARGE))
    other.write_bytes(bytes(LARGE))
    assert sample_of(str(one)) == sample_of(str(other))
    other.write_bytes(bytes(LARGE - 1) + b"1")
    assert sample_of(str(one)) != sample_of(str(other))
    other.write_bytes(bytes(LARGE + 1))
    assert sample_of(str(one)) != sample_of(str(other))


def test_file_that_is_missing_is_named(tmp_path):
    """A usage error: trying again does not help."""
    with pytest.raises(UsageError, match=r"none\.bin") as found:
        sample_of(str(tmp_path / "none.bin"))
    assert found.value.code == "model.missing"

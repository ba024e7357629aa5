"""Goal: the shared directory is ours alone, and its sockets can be bound."""

import os
import socket
import stat

import pytest

from plumbing.errors import UsageError
from plumbing.pod import paths
from plumbing.wire import sockets


@pytest.fixture
def short(tmp_path, monkeypatch):
    """The test's directory under a short name, as `sun_path` wants it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sockets, "SOCKET_PATH_BYTES_MAX", 4096)
    return tmp_path


def test_missing_directory_is_made_0700_whatever_the_umask(short):
    """Goal: nobody else may enter; method: umask 0, then look at the mode."""
    old = os.umask(0)
    try:
        made = paths.runtime_dir("run")
    finally:
        os.umask(old)
    assert made == str(short / "run")
    assert stat.S_IMODE(os.stat(made).st_mode) == 0o700
    assert paths.runtime_dir(made) == made


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("open", "service.open_directory", "chmod 700"),
        ("file", "service.not_a_directory", "remove it"),
        ("link", "service.not_a_directory", "remove it"),
        ("none/run", "service.directory_refused", "create "),
        ("file/run", "service.directory_refused", "Not a directory"),
        ("good", "service.foreign_directory", "belongs to uid"),
    ],
)
def test_directory_that_is_not_ours_alone_is_refused_with_the_fix(
    short, monkeypatch, name, code, words
):
    """Goal: what is wrong is said and not changed."""
    for each, mode in (("open", 0o755), ("good", 0o700)):
        (short / each).mkdir()
        (short / each).chmod(mode)
    (short / "file").write_text("")
    (short / "link").symlink_to("good")
    if name == "good":
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UsageError, match=words) as caught:
        paths.runtime_dir(str(short / name))
    assert (caught.value.code, caught.value.exit_code) == (code, 2)
    assert stat.S_IMODE((short / "open").stat().st_mode) == 0o755


def test_socket_path_limit_is_the_kernels(tmp_path, monkeypatch):
    """Goal: the limit is said at the start and not at bind. Method: a directory that is too long;
    the longest path that can be bound, in bytes and not characters, and one byte more."""
    with pytest.raises(UsageError, match="107"):
        paths.runtime_dir(str(tmp_path / ("x" * 100)))
    assert list(tmp_path.iterdir()) == []
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        sockets.check_path("é" * 53 + "x")
        listener.bind("é" * 53 + "x")
    with pytest.raises(UsageError, match="108 bytes"):
        sockets.check_path("é" * 54)

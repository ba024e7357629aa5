"""Goal: the shared directory is ours alone, and its sockets can be bound."""

import os
import socket
import stat

import pytest

from plumbing.errors import UsageError
from plumbing.pod import paths


def refused(path, code):
    with pytest.raises(UsageError) as caught:
        paths.runtime_dir(str(path))
    assert caught.value.code == code
    assert caught.value.exit_code == 2
    return caught.value.message


@pytest.fixture
def short(tmp_path, monkeypatch):
    """The test's directory under a short name, as `sun_path` wants it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(paths, "SOCKET_PATH_BYTES_MAX", 4096)
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


def test_directory_open_to_others_is_refused_with_the_fix(short):
    """Goal: a mode is checked, not changed; method: 0755."""
    (short / "run").mkdir(mode=0o755)
    (short / "run").chmod(0o755)
    assert "chmod 700" in refused(short / "run", "service.open_directory")
    assert stat.S_IMODE((short / "run").stat().st_mode) == 0o755


def test_file_and_symbolic_link_are_refused(short):
    """Goal: only a real directory; method: a file, and a link to a good directory."""
    (short / "file").write_text("")
    refused(short / "file", "service.not_a_directory")
    (short / "good").mkdir(mode=0o700)
    (short / "link").symlink_to("good")
    refused(short / "link", "service.not_a_directory")


def test_missing_parent_is_named(short):
    """Goal: one directory is made, not a tree; method: two missing components."""
    assert str(short / "a") in refused(short / "a" / "b", "service.directory_refused")


def test_parent_that_is_a_file_is_a_sentence(short):
    """Goal: no stack trace for a wrong path; method: a file as parent."""
    (short / "file").write_text("")
    assert "Not a directory" in refused(short / "file" / "run", "service.directory_refused")


def test_foreign_owner_is_refused(short, monkeypatch):
    """Goal: one uid for all containers; method: pretend to be another uid."""
    (short / "run").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert "belongs to uid" in refused(short / "run", "service.foreign_directory")


def test_directory_too_long_for_sockets_is_refused_before_it_is_made(tmp_path):
    """Goal: said at the start, not at bind; method: a long name."""
    path = tmp_path / ("x" * 100)
    assert "107" in refused(path, "service.path_too_long")
    assert not path.exists()


def test_socket_path_limit_is_the_kernels(tmp_path, monkeypatch):
    """Goal: 107 bytes bind and 108 do not; method: bind both, in bytes and not characters."""
    monkeypatch.chdir(tmp_path)
    for name, fits in (("é" * 53 + "x", True), ("é" * 54, False)):
        with socket.socket(socket.AF_UNIX) as listener:
            if fits:
                listener.bind(paths.socket_path("", name))
                continue
            with pytest.raises(OSError, match="too long"):
                listener.bind(name)
            with pytest.raises(UsageError, match="108 bytes"):
                paths.socket_path("", name)

"""Goal: a small file is never seen half-written, and a full disk leaves the old one alone."""

import json
import os
import resource
import signal
import stat
import subprocess
import sys
import textwrap

import pytest

from plumbing.errors import UnderstudyError
from plumbing.service.files import read_json, write_atomic


def test_write_replaces_content_with_mode_0600_and_leaves_nothing_beside(tmp_path):
    """Goal: content, mode, no litter; method: write twice and list the directory."""
    path = tmp_path / "state.json"
    write_atomic(str(path), {"state": "init"})
    write_atomic(str(path), {"state": "active", "name": "é"})
    assert read_json(str(path)) == {"state": "active", "name": "é"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["state.json"]


def test_reader_with_the_old_file_open_keeps_the_old_content(tmp_path):
    """Goal: replacement, not rewriting; method: hold the old file open across a write."""
    path = tmp_path / "state"
    write_atomic(str(path), "old")
    with open(path) as stream:
        write_atomic(str(path), b"new")
        assert stream.read() == "old"
    assert path.read_bytes() == b"new"


def test_full_disk_raises_and_keeps_the_old_content(tmp_path):
    """Goal: ENOSPC's cousin EFBIG; method: a child whose RLIMIT_FSIZE is smaller than the file."""
    path = tmp_path / "state.json"
    write_atomic(str(path), {"kept": True})
    program = textwrap.dedent(
        """
        import resource, signal, sys
        from plumbing.service.files import write_atomic
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            write_atomic(sys.argv[1], {"big": "x" * 100_000})
        except OSError as error:
            print(error.errno)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["27"], done.stderr
    assert json.loads(path.read_text()) == {"kept": True}
    assert os.listdir(tmp_path) == ["state.json"]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    assert signal.getsignal(signal.SIGXFSZ) is not None


def test_full_filesystem_raises_enospc_and_keeps_the_old_content(tmp_path):
    """Goal: the real ENOSPC; method: a tmpfs of 64 KiB in a mount namespace of its own."""
    mount = tmp_path / "small"
    mount.mkdir()
    program = textwrap.dedent(
        """
        import os, sys
        from plumbing.service.files import write_atomic
        path = sys.argv[1] + "/state.json"
        write_atomic(path, {"kept": True})
        try:
            write_atomic(path, {"big": "x" * 1_000_000})
        except OSError as error:
            print(error.errno, open(path).read().split(), os.listdir(sys.argv[1]))
        """
    )
    mounted = 'mount -t tmpfs -o size=64k none "$1" && exec "$2" -c "$3" "$1"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", mounted, "sh", str(mount), sys.executable, program],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0 and ("unshare" in done.stderr or "mount" in done.stderr):
        pytest.skip(f"this machine gives no mount namespace: {done.stderr.strip()}")
    assert done.stdout == "28 ['{', '\"kept\":', 'true', '}'] ['state.json']\n", done.stderr


def test_missing_directory_is_an_oserror(tmp_path):
    """Goal: the caller learns of it; method: a directory that is not there."""
    with pytest.raises(FileNotFoundError):
        write_atomic(str(tmp_path / "none" / "state"), "x")


def test_read_json_tells_missing_from_broken(tmp_path):
    """Goal: no file is normal, a broken one is not; method: each kind."""
    assert read_json(str(tmp_path / "none.json")) is None
    for content in (b"", b'{"a": ', b"[1]", b"\xff\xfe"):
        path = tmp_path / "broken.json"
        path.write_bytes(content)
        with pytest.raises(UnderstudyError, match="is not valid") as caught:
            read_json(str(path))
        assert caught.value.code == "service.broken_file"

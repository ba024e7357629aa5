"""Goal: a small file is never seen half-written, and a full disk leaves the old one alone."""

import json
import os
import stat
import subprocess
import sys
import textwrap

import pytest

from plumbing.errors import UnderstudyError
from plumbing.service import files
from plumbing.service.files import read_json, write_atomic


def test_write_replaces_content_with_mode_0600_and_leaves_nothing_beside(tmp_path):
    """Goal: content, mode, no litter; method: write twice and list the directory."""
    path = tmp_path / "state.json"
    write_atomic(str(path), {"state": "init"})
    write_atomic(str(path), {"state": "active", "name": "é"})
    assert read_json(str(path)) == {"state": "active", "name": "é"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["state.json"]


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


def test_planted_file_or_link_is_never_written_to(tmp_path):
    """Goal: in a directory that others can write to, no file of theirs is overwritten through a
    name that they planted. Method: a link of either kind at the name that is about to be used."""
    victim, page = tmp_path / "victim", tmp_path / "page.html"
    victim.write_text("precious")
    for plant in (os.symlink, os.link):
        plant(victim, tmp_path / ".page.html.tmp")
        write_atomic(str(page), "ours")
        assert victim.read_text() == "precious"
        assert page.read_text() == "ours"
        assert not page.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["page.html", "victim"]


def test_what_a_killed_writer_left_is_replaced_by_the_next_one(tmp_path):
    """Goal: a writer that is killed changes nothing and leaves no litter. Method: one that is
    killed between writing and renaming, then another one."""
    path = str(tmp_path / "state")
    program = textwrap.dedent(
        """
        import os, signal, sys
        from plumbing.service.files import write_atomic
        os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        write_atomic(sys.argv[1], "never seen")
        """
    )
    subprocess.run([sys.executable, "-c", program, path], check=False)
    assert os.listdir(tmp_path) == [".state.tmp"]
    write_atomic(path, "ours")
    assert os.listdir(tmp_path) == ["state"]


def test_slot_file_is_created_through_no_planted_link(tmp_path):
    """Goal: the same for a file of slots, whose fixed name is reused after a crash; method: a link,
    and a hard link, at the name of the unfinished file."""
    victim = tmp_path / "victim"
    path = str(tmp_path / "record")
    for plant in (os.symlink, os.link):
        victim.write_text("precious")
        plant(victim, f"{path}.new")
        files.SlotFormat("test 1").create(path, b"{}")
        assert victim.read_text() == "precious"
        assert not os.path.islink(path)
        assert sorted(os.listdir(tmp_path)) == ["record", "victim"]


def test_read_json_tells_missing_from_broken(tmp_path):
    """Goal: no file is normal, a broken one is not; method: each kind."""
    assert read_json(str(tmp_path / "none.json")) is None
    for content in (b"", b'{"a": ', b"[1]", b"\xff\xfe"):
        path = tmp_path / "broken.json"
        path.write_bytes(content)
        with pytest.raises(UnderstudyError, match="is not valid") as caught:
            read_json(str(path))
        assert caught.value.code == "service.broken_file"

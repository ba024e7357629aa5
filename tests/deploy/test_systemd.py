"""The example units are valid and confined, as Debian's own systemd-analyze sees them in a root
that is made for them, and run what our code takes."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.manifests import DEPLOY
from tests.deploy.test_manifests import PROGRAMS
from tests.helpers import run_command

SYSTEMD = DEPLOY / "systemd"
POOL = "pool/pool.service"
SERVICES = ("lockserver.service", "gateway.service", POOL, "gms.service", "engine@.service")
ENGINES_OF_A_POOL = "pool/engine.conf"  # a drop-in of engine@.service

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="needs systemd-analyze"
)


def values(unit: str, key: str) -> list[str]:
    """Every value that `unit` gives `key`, in order."""
    text = (SYSTEMD / unit).read_text()
    return re.findall(rf"^{re.escape(key)}=(.*)$", text, re.MULTILINE)


def words(line: str) -> list[str]:
    """A command, without the init above it."""
    found = line.split()
    return found[2:] if found[0].endswith("/understudy-init") else found


def value(unit: str, key: str) -> str:
    (found,) = values(unit, key)
    return found


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with the host's units, ours, and something to execute."""
    units = tmp_path / "etc/systemd/system"
    units.mkdir(parents=True)
    for path in (*SYSTEMD.glob("*.service"), SYSTEMD / POOL, *SYSTEMD.glob("*.target")):
        shutil.copy(path, units)
    shutil.copytree("/lib/systemd/system", tmp_path / "usr/lib/systemd/system", symlinks=True)
    (tmp_path / "lib").symlink_to("usr/lib")
    for unit in SERVICES:
        for line in values(unit, "ExecStart") + values(unit, "ExecReload"):
            program = tmp_path / line.split()[0].removeprefix("/")
            program.parent.mkdir(parents=True, exist_ok=True)
            program.touch(mode=0o755)
    return tmp_path


def verify(root: Path, engine: str = "0") -> subprocess.CompletedProcess[str]:
    names = [Path(name).name.replace("@.", f"@{engine}.") for name in SERVICES]
    command = ["systemd-analyze", "verify", f"--root={root}", "--man=no", "--recursive-errors=yes"]
    return run_command([*command, "understudy.target", *names])


@needs_systemd
def test_units_are_valid(root: Path):
    said = verify(root)
    assert (said.returncode, said.stderr) == (0, "")


@needs_systemd
def test_units_of_a_pool_are_valid(root: Path):
    """With its target and its drop-in in place of the pair's."""
    units = root / "etc/systemd/system"
    shutil.copy(SYSTEMD / "pool/understudy.target", units)
    (units / "engine@.service.d").mkdir()
    drop_in = shutil.copy(SYSTEMD / ENGINES_OF_A_POOL, units / "engine@.service.d/pool.conf")
    said = verify(root, "chat-0")
    assert (said.returncode, said.stderr) == (0, "")
    drop_in.write_text(drop_in.read_text().replace("ExecStart=/opt", "ExecStart=opt"))
    assert verify(root, "chat-0").returncode != 0  # the drop-in was looked at


@pytest.mark.parametrize("unit", [*SERVICES, ENGINES_OF_A_POOL])
def test_command_is_one_of_ours(unit: str):
    path, verb, *rest = words(values(unit, "ExecStart")[-1])
    assert path.startswith("/opt/understudy/bin/")
    ours = rest[: rest.index("--")] if "--" in rest else rest
    PROGRAMS[path.rpartition("/")[2]].commands[verb].make_context(verb, ours)

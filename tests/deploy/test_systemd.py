"""Goal: the units are valid, run what our code takes, and keep the pod's promises on a host.

Method: Debian's own systemd-analyze and systemd-sysusers in a root made for them, and the units as
data against our code: its flags, its variables, its budgets.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import click
import pytest

import engine.cli
import gateway.cli
import gms.cli
import lockserver.cli
import pool.cli
from engine.backends.registry import REGISTRY
from engine.core.relaunch import BACKOFF_FIRST_MS, BACKOFF_MAX_MS
from plumbing.pod.supervision import GRACE_MS
from plumbing.service import notify
from plumbing.service.process import FDS_ADVISED
from tests.deploy.manifests import DEPLOY
from understudy.cli.settings import DIRECTORY

SYSTEMD = DEPLOY / "systemd"
POOL = "pool/pool.service"
SERVICES = ("lockserver.service", "gateway.service", POOL, "gms.service", "engine@.service")
WITH_DEVICES = SERVICES[3:]
ENGINES_OF_A_POOL = "pool/engine.conf"  # a drop-in of engine@.service
PROGRAMS: dict[str, click.Group] = {
    "lockserver": lockserver.cli.main,
    "gms": gms.cli.main,
    "gateway": gateway.cli.main,
    "pool": pool.cli.main,
    "engine": engine.cli.main,
}
EXPOSURE_MAX = 2.5  # of 10, as systemd-analyze counts; 4.9 and less is its "OK"
SYSTEM_UIDS_END = 1000  # logind removes the shared memory of users from here on

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="needs systemd-analyze"
)


def values(unit: str, key: str) -> list[str]:
    """Every value that `unit` gives `key`, in order."""
    text = (SYSTEMD / unit).read_text()
    return re.findall(rf"^{re.escape(key)}=(.*)$", text, re.MULTILINE)


def value(unit: str, key: str) -> str:
    (found,) = values(unit, key)
    return found


def seconds(text: str) -> float:
    """A time of systemd's, as far as the units use them."""
    number, unit = re.fullmatch(r"([\d.]+)(ms|s|)", text).groups()
    return float(number) / (1000 if unit == "ms" else 1)


def variables() -> dict[str, str]:
    """What the example of an environment file sets, commented lines too."""
    text = (SYSTEMD / "understudy.env").read_text()
    return dict(re.findall(r"^#?([A-Z_]+)=(.*)$", text, re.MULTILINE))


# ------------------------------------------------------------------ as systemd sees them


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
        program = tmp_path / value(unit, "ExecStart").split()[0].removeprefix("/")
        program.parent.mkdir(parents=True, exist_ok=True)
        program.touch(mode=0o755)
    return tmp_path


def verify(root: Path, engine: str = "0") -> subprocess.CompletedProcess[str]:
    names = [Path(name).name.replace("@.", f"@{engine}.") for name in SERVICES]
    command = ["systemd-analyze", "verify", f"--root={root}", "--man=no", "--recursive-errors=yes"]
    return subprocess.run(
        [*command, "understudy.target", *names], capture_output=True, text=True, check=False
    )


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


@needs_systemd
@pytest.mark.parametrize("unit", SERVICES)
def test_typing_errors_in_units_are_found(root: Path, unit: str):
    """The check itself: a word that systemd does not know fails it."""
    path = root / "etc/systemd/system" / Path(unit).name
    path.write_text(path.read_text().replace("Restart=always", "Restart=allways"))
    assert verify(root).returncode != 0


@needs_systemd
@pytest.mark.parametrize("unit", SERVICES)
def test_units_are_confined(unit: str):
    limit = f"--threshold={EXPOSURE_MAX * 10:.0f}"
    command = ["systemd-analyze", "security", "--offline=yes", "--no-pager", limit]
    said = subprocess.run([*command, SYSTEMD / unit], capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stdout


@pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="needs systemd-sysusers")
def test_user_of_the_units_is_a_system_user(root: Path):
    command = ["systemd-sysusers", f"--root={root}", SYSTEMD / "sysusers.conf"]
    subprocess.run(command, capture_output=True, check=True)
    users = (line.split(":") for line in (root / "etc/passwd").read_text().splitlines())
    uids = {name: int(uid) for name, _, uid, *_ in users}
    assert {value(unit, "User") for unit in SERVICES} == {"understudy"}
    assert 0 < uids["understudy"] < SYSTEM_UIDS_END


# ------------------------------------------------------------------ against our code


@pytest.mark.parametrize("unit", [*SERVICES, ENGINES_OF_A_POOL])
def test_command_is_one_of_ours(unit: str):
    path, verb, *rest = values(unit, "ExecStart")[-1].split()
    assert path.startswith("/opt/understudy/bin/")
    group = PROGRAMS[path.rpartition("/")[2]]
    ours = rest[: rest.index("--")] if "--" in rest else rest
    group.commands[verb].make_context(verb, ours)


def test_every_variable_is_read_by_somebody():
    """A typing error in a name would be a default, in silence."""
    known = {"BACKEND_ARGS"}
    for unit in SERVICES:
        path, verb, *_ = value(unit, "ExecStart").split()
        for option in PROGRAMS[path.rpartition("/")[2]].commands[verb].params:
            known.update(re.findall(r"[A-Z][A-Z_]+", getattr(option, "help", "") or ""))
    assert set(variables()) <= known
    assert "$BACKEND_ARGS" in value("engine@.service", "ExecStart").split()
    text = (SYSTEMD / "understudy.env").read_text()
    backends = re.findall(r"^#?UNDERSTUDY_BACKEND=(.*)$", text, re.MULTILINE)
    assert {"vllm", "reference"} == set(backends) <= set(REGISTRY)


@pytest.mark.parametrize("unit", SERVICES)
def test_unit_is_told_when_its_program_serves_and_that_it_does_not_hang(unit: str):
    """Goal: no init is needed here. Method: the settings that sd_notify(3) depends on, and room for
    many of the program's beats."""
    assert value(unit, "Type") == "notify"
    assert float(value(unit, "WatchdogSec").removesuffix("s")) >= 20 * notify.BEAT_S


def test_all_share_one_directory_that_outlives_each():
    for unit in SERVICES:
        assert f"/run/{value(unit, 'RuntimeDirectory')}" == DIRECTORY
        assert value(unit, "RuntimeDirectoryMode") == "0700"
        assert value(unit, "RuntimeDirectoryPreserve") == "yes"
        assert value(unit, "UMask") == "0077"


def test_engines_are_called_as_everywhere():
    assert "ENGINE_ID=engine-%i" in values("engine@.service", "Environment")
    wanted = value("understudy.target", "Wants").split()
    servers = ["lockserver.service", "gms.service", "gateway.service"]
    assert wanted == [*servers, "engine@0.service", "engine@1.service"]


def test_engines_of_a_pool_are_called_as_its_file_says():
    """Goal: engine@chat-0 is the engine chat-0, and nothing of the pair is left. Method: what the
    drop-in replaces; an engine's id is a word that systemd does not escape."""
    assert values(ENGINES_OF_A_POOL, "Environment") == ["ENGINE_ID=%i"]
    assert values(ENGINES_OF_A_POOL, "ExecStart") == ["", "/opt/understudy/bin/engine run"]
    assert values(ENGINES_OF_A_POOL, "After") == ["pool.service"]
    wanted = value("pool/understudy.target", "Wants").split()
    assert wanted == [*value("understudy.target", "Wants").split()[:3], "pool.service"]
    assert value("engine@.service", "WantedBy") == "understudy.target"  # what `enable` adds
    assert {"UNDERSTUDY_POOL", "UNDERSTUDY_MODELS", "UNDERSTUDY_HOST_MEMORY"} <= {*variables()}


# ------------------------------------------------------------------ the pod's promises


@pytest.mark.parametrize("unit", SERVICES)
def test_death_of_one_takes_nobody_along(unit: str):
    """An order, and the target's stop: nothing else ties the units together."""
    text = (SYSTEMD / unit).read_text()
    assert not re.search(r"^(Requires|Requisite|BindsTo|Conflicts)=", text, re.MULTILINE)
    assert value(unit, "PartOf") == "understudy.target"


@pytest.mark.parametrize("unit", SERVICES)
def test_whatever_dies_is_started_again_for_ever(unit: str):
    assert value(unit, "Restart") == "always"
    assert value(unit, "StartLimitIntervalSec") == "0"
    assert seconds(value(unit, "RestartSec")) * 1000 == BACKOFF_FIRST_MS
    assert seconds(value("backoff.conf", "RestartMaxDelaySec")) * 1000 == BACKOFF_MAX_MS


def test_stopped_engine_drains_before_its_neighbours_go():
    """SIGTERM to the supervisor alone, time for the drain, and an order that is kept backwards."""
    unit = "engine@.service"
    assert value(unit, "KillMode") == "mixed"
    assert seconds(value(unit, "TimeoutStopSec")) == GRACE_MS / 1000
    servers = {"lockserver.service", "gms.service", "gateway.service"}
    assert servers <= set(value(unit, "After").split())


def test_stopped_gateway_has_the_time_that_its_streams_may_take():
    unit = "gateway.service"
    assert seconds(value(unit, "TimeoutStopSec")) == GRACE_MS / 1000
    assert value(unit, "KillMode") == "mixed"  # its parent says when a child ends
    assert value(unit, "OOMPolicy") == "continue"


@pytest.mark.parametrize("unit", SERVICES)
def test_nothing_is_confined_that_the_pod_needs(unit: str):
    """What looks like one more line of hardening and would be an outage."""
    assert not set(values(unit, "RemoveIPC")) & {"yes", "true", "1", "on"}
    assert "AF_UNIX" in value(unit, "RestrictAddressFamilies").split()
    assert int(value(unit, "LimitNOFILE")) >= FDS_ADVISED
    if unit in WITH_DEVICES:
        for closing in ("PrivateDevices", "ProtectClock", "DeviceAllow", "MemoryDenyWriteExecute"):
            assert not values(unit, closing)
        assert value(unit, "OOMPolicy") == "continue"

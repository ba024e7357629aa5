"""Goal: the units run, confined as they are, and systemd starts again and stops as they say.

Method: Debian's systemd as PID 1 of a container, with our units and nothing else. Kills go through
systemctl, and the pod is seen through the container's root.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.image import why_not
from tests.deploy.manifests import DEPLOY
from tests.deploy.podman_pod import LIMITS, podman
from tests.e2e.pods import make_model
from tests.helpers import until
from understudy.drill.killer import Whole, wait_whole
from understudy.status.gather import gather

UNITS = ("lockserver", "gms", "gateway", "engine@0", "engine@1")
WHOLE_DEADLINE_S = 90.0
STOPPED_DEADLINE_S = 60.0
ENVIRONMENT = """
UNDERSTUDY_SERVICE=active=127.0.0.1:8000
UNDERSTUDY_MEMORY=host
UNDERSTUDY_DEVICE_BYTES=256MiB
UNDERSTUDY_BACKEND=reference
BACKEND_ARGS=--model=/srv/model
"""

OF_A_POOL = """
UNDERSTUDY_POOL=/etc/understudy/pool.yaml
UNDERSTUDY_MODELS=chat,coder
"""
POOL_FILE = """
devices: [0]
margin: 0
defaults: {min_runtime: 200ms, max_wait: 100ms}
models:
  chat: &small {backend: reference, model: /srv/model, shadow: follows, preload: true}
  coder: {<<: *small, shadow: none, preload: false}
"""
ENGINES_OF_THE_POOL = ("engine@chat-0", "engine@chat-1", "engine@coder-0")

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]


class Host:
    """A container that is a host with systemd and the pod's units; `pool`: a pool file, for those
    of a pool."""

    def __init__(self, image: str, etc: Path, model: Path, pool: str = "") -> None:
        units = etc / "system"
        units.mkdir()
        for path in (*DEPLOY.glob("systemd/*.service"), *DEPLOY.glob("systemd/*.target")):
            shutil.copy(path, units)
        (units / "default.target").symlink_to("understudy.target")
        (etc / "understudy.env").write_text(ENVIRONMENT + (OF_A_POOL if pool else ""))
        (etc / "pool.yaml").write_text(pool)
        mounts = {
            units: "/etc/systemd/system",
            etc / "understudy.env": "/etc/understudy/understudy.env",
            etc / "pool.yaml": "/etc/understudy/pool.yaml",
            model: "/srv/model",
        }
        if pool:
            _install_pool(units)
        self._id = asyncio.run(
            podman(
                "run", "--detach", "--privileged", "--systemd=always", "--user=0:0",
                "--network=none", *LIMITS,
                *(f"--volume={source}:{target}:ro" for source, target in mounts.items()),
                image, "/lib/systemd/systemd",
            )
        )  # fmt: skip
        pid = asyncio.run(podman("container", "inspect", "--format={{.State.Pid}}", self._id))
        self.directory = Path(f"/proc/{pid}/root/run/understudy")

    def run(self, *command: str) -> str:
        return asyncio.run(podman("exec", self._id, *command))

    def shown(self, unit: str, name: str) -> str:
        """A property of `unit`, as systemctl shows it."""
        return self.run("systemctl", "show", "--value", f"--property={name}", unit)

    def kill(self, unit: str) -> None:
        """SIGKILL to the unit's main process alone."""
        self.run("systemctl", "kill", "--kill-whom=main", "--signal=KILL", unit)

    def journal(self) -> str:
        return self.run("journalctl", "--no-pager", "--output=cat", "--lines=200")

    def whole(self, after: int = 0) -> Whole:
        """Wait until the pod is, under a newer grant than `after`."""
        end = time.monotonic() + WHOLE_DEADLINE_S
        until(self.directory.exists, "the pod's directory", WHOLE_DEADLINE_S)
        while True:
            found = asyncio.run(wait_whole(self.directory, deadline_s=end - time.monotonic()))
            if found.token > after:
                return found

    def close(self) -> None:
        asyncio.run(podman("rm", "--force", "--time=0", self._id))


def _install_pool(units: Path) -> None:
    """As docs/deploy.md says."""
    source = DEPLOY / "systemd/pool"
    for name in ("pool.service", "understudy.target"):
        shutil.copy(source / name, units)
    (units / "engine@.service.d").mkdir()
    shutil.copy(source / "engine.conf", units / "engine@.service.d/pool.conf")
    wants = units / "understudy.target.wants"  # as `systemctl enable` does
    wants.mkdir()
    for engine in ENGINES_OF_THE_POOL:
        (wants / f"{engine}.service").symlink_to("../engine@.service")


@pytest.fixture(scope="module")
def host(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    base = tmp_path_factory.mktemp("systemd")
    found = Host(image, base, make_model(base / "model"))
    try:
        yield found
    finally:
        print(found.journal())
        found.close()


def unit_of(engine: str) -> str:
    return engine.replace("engine-", "engine@")


def test_boot_makes_the_pod_whole(host: Host):
    whole = host.whole()
    assert {whole.engine, *whole.standbys} == {"engine-0", "engine-1"}
    assert [host.shown(unit, "ActiveState") for unit in UNITS] == ["active"] * len(UNITS)
    assert oct(host.directory.stat().st_mode & 0o777) == "0o700"


def test_killed_supervisor_is_a_failover_and_is_started_again(host: Host):
    before = host.whole()
    host.kill(unit_of(before.engine))
    after = host.whole(after=before.token)
    assert (after.engine, after.standbys) == (*before.standbys, (before.engine,))
    assert host.shown(unit_of(before.engine), "NRestarts") == "1"
    assert host.shown(unit_of(after.engine), "NRestarts") == "0"


def test_restarted_engine_drains_and_is_the_spare_one(host: Host):
    before = host.whole()
    host.run("systemctl", "restart", unit_of(before.engine))
    after = host.whole(after=before.token)
    assert (after.engine, after.standbys) == (*before.standbys, (before.engine,))
    assert "draining → dead: drained" in host.journal()


@pytest.mark.parametrize("server", ["lockserver", "gms", "gateway"])
def test_killed_server_comes_back_and_takes_nobody_along(host: Host, server: str):
    before = host.whole()
    engines = [host.shown(unit, "MainPID") for unit in UNITS[3:]]
    old = host.shown(server, "MainPID")
    host.kill(server)
    until(lambda: host.shown(server, "MainPID") not in ("0", old), f"the restart of {server}")
    assert host.whole() == before
    assert [host.shown(unit, "MainPID") for unit in UNITS[3:]] == engines


def test_stop_of_the_target_stops_all_and_keeps_the_directory(host: Host):
    host.whole()
    host.run("systemctl", "stop", "understudy.target")
    for unit in UNITS:
        until(
            lambda unit=unit: host.shown(unit, "ActiveState") == "inactive",
            f"the end of {unit}",
            STOPPED_DEADLINE_S,
        )
        assert host.shown(unit, "Result") == "success"
    assert (host.directory / "lockserver.json").exists()
    view = asyncio.run(gather(host.directory))
    assert view["active"] is None


# ------------------------------------------------------------------ a pool


@pytest.fixture(scope="module")
def pool_host(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    base = tmp_path_factory.mktemp("systemd-pool")
    found = Host(image, base, make_model(base / "model"), POOL_FILE)
    try:
        yield found
    finally:
        print(found.journal())
        found.close()


ASK = """
import json, sys, urllib.request
asked = {"model": sys.argv[1], "prompt": "one rainy day", "max_tokens": 8, "temperature": 0}
request = urllib.request.Request("http://127.0.0.1:8000/v1/completions", json.dumps(asked).encode())
request.add_header("Content-Type", "application/json")
print(json.load(urllib.request.urlopen(request, timeout=90))["choices"][0]["text"])
"""


def answer(host: Host, model: str) -> str:
    return host.run("python3", "-c", ASK, model)


def answers(host: Host) -> bool:
    """Whether clients reach the gateway."""
    said = host.run("sh", "-c", "understudy pool status --json || true")
    return '"gateways": [' in said and '"gateway": "' in said


def test_units_of_a_pool_serve_every_model_and_survive_a_restart_of_the_host(pool_host: Host):
    """Goal: `systemctl` alone runs a pool. Method: a boot; both models; the pool killed; the whole
    target stopped and started on the directory that stays; both models again."""
    until(lambda: answers(pool_host), "the pool", WHOLE_DEADLINE_S)
    texts = {model: answer(pool_host, model) for model in ("chat", "coder")}
    assert all(texts.values())
    old = pool_host.shown("pool", "MainPID")
    pool_host.kill("pool")
    until(lambda: pool_host.shown("pool", "MainPID") not in ("0", old), "the pool's restart")
    assert {model: answer(pool_host, model) for model in texts} == texts
    pool_host.run("systemctl", "stop", "understudy.target")
    for unit in (*UNITS[:3], "pool", *ENGINES_OF_THE_POOL):
        until(
            lambda unit=unit: pool_host.shown(unit, "ActiveState") == "inactive",
            f"the end of {unit}",
            STOPPED_DEADLINE_S,
        )
    pool_host.run("systemctl", "start", "understudy.target")
    until(lambda: answers(pool_host), "the pool again", WHOLE_DEADLINE_S)
    assert {model: answer(pool_host, model) for model in texts} == texts

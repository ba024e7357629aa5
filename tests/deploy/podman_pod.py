"""The pod of the rendered manifests as real containers: a kubelet's part, played with podman.

Owns the containers that it makes, known by their ids, and the folders that stand for the pod's
volumes. What differs from the manifest is the image, which a kubelet fills in, and the ports, which
have to be free here.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tests.deploy.container_image import PODMAN
from tests.deploy.manifests import (
    INIT,
    Document,
    containers,
    environment,
    every_container,
    init_containers,
    pod_spec,
    words,
)
from tests.helpers import free_ports
from understudy.http_get import get

OVERLAY = "cpu"
SERVICE_PORT = 8000  # in the manifests
STARTED_DEADLINE_S = 120.0
PODMAN_DEADLINE_S = 90.0  # longer than the grace of a stop
LOG_LINES = 100
# What podman would ask for, a million descriptors, is more than a machine may allow.
LIMITS = [
    f"--ulimit={name}={most}:{most}"
    for name, most in (
        ("nofile", min(20_000, resource.getrlimit(resource.RLIMIT_NOFILE)[1])),
        ("nproc", min(8_192, resource.getrlimit(resource.RLIMIT_NPROC)[1])),
    )
]


async def podman(*arguments: str) -> str:
    """What podman printed, on both streams if that is how it says it; fails with its own words."""
    process = await asyncio.create_subprocess_exec(
        *PODMAN, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(PODMAN_DEADLINE_S):
            out, err = (each.decode(errors="replace") for each in await process.communicate())
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    assert process.returncode == 0, f"podman {' '.join(arguments[:3])} …: {err}"
    return (err + out if arguments[0] == "logs" else out).strip()


class PodmanPod:
    """The containers of the overlay's pod and their volumes."""

    def __init__(self, image: str) -> None:
        self._image = image
        # In memory, as the manifests have it, and short: sockets are in it.
        self._volumes = Path(tempfile.mkdtemp(prefix="understudy-pod-", dir="/dev/shm"))
        self._ids: dict[str, str] = {}
        self._specs = {each["name"]: each for each in containers(OVERLAY)}
        self.service_port = free_ports(1 + len(self._specs))
        self._ports = {
            name: self.service_port + 1 + number for number, name in enumerate(self._specs)
        }

    @property
    def names(self) -> list[str]:
        return list(self._specs)

    @property
    def directory(self) -> Path:
        """The directory that the containers share, as it is called outside of them."""
        return self._volumes / "shared" / "understudy"

    # ------------------------------------------------------------------ what a kubelet does

    async def start(self) -> None:
        """Make every container in order; a sidecar's startup probe holds the next one back, and an
        init container's end."""
        for container in every_container(OVERLAY):
            name = container["name"]
            if name not in self._specs:
                await podman("run", "--rm", *self._flags(container))
                continue
            self._ids[name] = await podman("run", "--detach", *self._flags(container))
            await self._started(name)

    async def restart(self, name: str) -> None:
        """Start the container again that has ended: the same root, a new PID namespace."""
        await self.ended(name)
        await podman("start", self._ids[name])
        await self._started(name)

    async def ended(self, name: str) -> int:
        """The exit code, once podman itself knows that the container has ended."""
        return int(await podman("wait", self._ids[name]))

    async def _started(self, name: str) -> None:
        path = self._specs[name]["startupProbe"]["httpGet"]["path"]
        url = f"http://127.0.0.1:{self._ports[name]}{path}"
        async with asyncio.timeout(STARTED_DEADLINE_S):
            while (await get(url)).status != 200:
                state = await self.state(name)
                assert state["Running"], f"{name} has ended:\n{await self.logs(name)}"

    async def stop(self, name: str) -> int:
        """SIGTERM to PID 1, and its grace; the exit code."""
        grace_s = pod_spec(OVERLAY)["terminationGracePeriodSeconds"]
        await podman("stop", f"--time={grace_s}", self._ids[name])
        return int((await self.state(name))["ExitCode"])

    async def close(self) -> list[str]:
        """Remove every container, by id, and the volumes; what could not be removed."""
        for container in self._ids.values():
            await podman("rm", "--force", "--time=0", container)
        shutil.rmtree(self._volumes, ignore_errors=True)
        listed = (await podman("ps", "--all", "--quiet", "--no-trunc")).split()
        left = [container for container in self._ids.values() if container in listed]
        return left + ([str(self._volumes)] if self._volumes.exists() else [])

    # ------------------------------------------------------------------ looking, and breaking

    async def state(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            await podman("container", "inspect", "--format={{json .State}}", self._ids[name])
        )
        return found

    async def pid(self, name: str) -> int:
        """Its PID 1, as it is called outside."""
        return int((await self.state(name))["Pid"])

    async def processes(self, name: str) -> list[int]:
        """Everything in the container: whatever is in the PID namespace of its PID 1."""
        namespace = pid_namespace(await self.pid(name))
        pids = (int(entry) for entry in os.listdir("/proc") if entry.isdigit())
        return [pid for pid in pids if pid_namespace(pid) == namespace]

    async def logs(self, name: str) -> str:
        """The last that it wrote."""
        return await podman("logs", f"--tail={LOG_LINES}", self._ids[name])

    # ------------------------------------------------------------------ the manifest, as flags

    def _flags(self, container: Document) -> list[str]:
        name = container["name"]
        security = pod_spec(OVERLAY)["securityContext"]
        variables = environment(OVERLAY, container)
        if name in self._ports:
            variables["UNDERSTUDY_HTTP_PORT"] = str(self._ports[name])
        command = [
            re.sub(rf":{SERVICE_PORT}$", f":{self.service_port}", word)
            for word in words(OVERLAY, container)
        ]
        return [
            "--network=host",  # one network for the pod's containers
            *LIMITS,
            f"--user={security['runAsUser']}:{security['runAsGroup']}",
            *_confined(container["securityContext"]),
            *(f"--volume={each}" for each in self._mounts(container)),
            *(f"--env={key}={value}" for key, value in variables.items()),
            self._image,
            *([] if container in init_containers(OVERLAY) else [INIT]),
            *command,
        ]

    def _mounts(self, container: Document) -> list[str]:
        found = []
        for mount in container["volumeMounts"]:
            source = self._volumes / mount["name"]
            source.mkdir(exist_ok=True)
            source.chmod(0o777)  # as a kubelet makes them
            mode = "ro" if mount.get("readOnly") else "rw"
            found.append(f"{source}:{mount['mountPath']}:{mode}")
        return found


def _confined(context: Document) -> list[str]:
    """A container's securityContext as flags; what is not understood here fails."""
    flags = {
        "allowPrivilegeEscalation": "--security-opt=no-new-privileges",
        "readOnlyRootFilesystem": "--read-only",
        "capabilities": "--cap-drop=ALL",
    }
    # podman would put writable folders over /run and /tmp, which a kubelet does not.
    return [*(flags[key] for key in context), "--read-only-tmpfs=false"]


def pid_namespace(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None  # it has ended

"""The directory that the processes of a pod share, and the names of the parts' files in it.

One file is written here: the list of the pod's devices, in order. A pool file may number its
devices; NVML, CUDA and each container can count differently, so a number counts what the memory
service (gms) serves, and all processes read its list once, when they start.

A user who may write there could become the lock server, so the directory must be private. That is
checked and never changed, because one with the wrong mode may already hold a foreign socket.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from plumbing.errors import UsageError
from plumbing.service.config import Option
from plumbing.service.files import write_atomic
from plumbing.wire.sockets import check_path

DIR = Option("dir", str, "/run/understudy", "The directory that the pod's processes share.")
LOCKSERVER_SOCKET = "lockserver.sock"
GATEWAY_SOCKET = "gateway.sock"
POOL_SOCKET = "pool.sock"
HTTP_SUFFIX = ".http.sock"  # of an engine's private socket; an engine's id has no dot
WEIGHTS = "weights"  # what a device's server serves, each on its socket
KV = "kv"
# How the memory files of a host device are called, before an id and a number (man 2 memfd_create).
SLAB_PREFIX = "understudy-"
KV_SLAB_PREFIX = "understudy_kv-"
# How a backend learns its devices in host memory, by rank, with commas; HOST-0 … unless set.
HOST_DEVICES_ENV = "UNDERSTUDY_HOST_DEVICES"

# The longest name that every pod needs; an engine or a device with a longer one is refused later.
LONGEST_COMMON_NAME = f"engine_engine-0{HTTP_SUFFIX}"


def lockserver_socket(directory: str) -> str:
    return os.path.join(directory, LOCKSERVER_SOCKET)


def lockserver_guard(directory: str) -> str:
    """The file that a running lock server has locked, with its pid in it."""
    return os.path.join(directory, "lockserver.lock")


def up_guard(directory: str) -> str:
    """The file that a running `understudy up` has locked, with its pid in it."""
    return os.path.join(directory, "up.lock")


def engine_socket(directory: str, engine: str) -> str:
    """The control socket of `engine`'s supervisor."""
    return os.path.join(directory, f"engine_{engine}.sock")


def engine_http_socket(directory: str, engine: str) -> str:
    """The private socket on which `engine`'s backend answers the gateway while it is active."""
    return os.path.join(directory, f"engine_{engine}{HTTP_SUFFIX}")


def engine_queue(directory: str, engine: str) -> str:
    """The page with what `engine` has queued and not scheduled (`plumbing.pod.queue_page`)."""
    return os.path.join(directory, f"engine_{engine}.queue")


def gateway_socket(directory: str) -> str:
    """The control socket of the gateway."""
    return os.path.join(directory, GATEWAY_SOCKET)


def pool_socket(directory: str) -> str:
    """The socket of the pool, for the gateway, leases and users."""
    return os.path.join(directory, POOL_SOCKET)


def pool_state(directory: str) -> str:
    """What the pool must know after a restart."""
    return os.path.join(directory, "pool.json")


def engine_state(directory: str, engine: str) -> str:
    """The state file of `engine`, which outlives its supervisor."""
    return os.path.join(directory, f"engine_{engine}.json")


def gms_socket(directory: str, device: str) -> str:
    """The socket of one device's memory server."""
    return os.path.join(directory, f"gms_{device}_{WEIGHTS}.sock")


def loader_lock(directory: str, model: str) -> str:
    """The file that the one engine that may write the weights of `model` has locked; "": of a pod
    without models."""
    return os.path.join(directory, f"loader_{model}.lock" if model else "loader.lock")


def gms_journal(directory: str, device: str, tag: str = WEIGHTS) -> str:
    """The record of what is committed on `device`, for a restarted server."""
    return os.path.join(directory, f"gms_{device}_{tag}.json")


def device_list(directory: str) -> str:
    """What the devices are called, in the memory service's order."""
    return os.path.join(directory, "devices.json")


def write_device_names(directory: str, names: Sequence[str]) -> None:
    """Put the list there. Without room for it there is none, rather than an old one: only a pool
    file with numbers needs it, and its readers say that it is missing."""
    path = device_list(directory)
    try:
        content = {"schema": 1, "pid": os.getpid(), "devices": list(names)}
        write_atomic(path, content)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(path)


def read_device_names(directory: str) -> tuple[str, ...]:
    """The list; empty if no memory service has written one."""
    try:
        with open(device_list(directory), encoding="utf-8") as stream:
            return tuple(map(str, json.load(stream)["devices"]))
    except (OSError, ValueError, KeyError, TypeError):
        return ()


def engine_sockets(directory: Path) -> dict[str, str]:
    """Path of each control socket that exists, by engine id."""
    return {
        path.stem.removeprefix("engine_"): str(path)
        for path in sorted(directory.glob("engine_*.sock"))
        if not path.name.endswith(HTTP_SUFFIX)
    }


def engine_states(directory: Path) -> list[Path]:
    """Every engine's state file that exists."""
    return sorted(directory.glob("engine_*.json"))


def gms_sockets(directory: Path) -> dict[str, str]:
    """Path of each weights' server's socket that exists, by device: `HOST-0` of
    `gms_HOST-0_weights.sock`."""
    pattern = f"gms_*_{WEIGHTS}.sock"
    # HOST-2 before HOST-10.
    found = sorted(directory.glob(pattern), key=lambda path: (len(path.name), path.name))
    return {path.stem.removeprefix("gms_").removesuffix(f"_{WEIGHTS}"): str(path) for path in found}


def runtime_dir(value: str) -> str:
    """Check the shared directory, or create it (0700, last component only); its absolute path.

    Raises:
        UsageError: not a directory, not ours, open to other users, or too long for sockets.
    """
    path = os.path.abspath(value)
    check_path(os.path.join(path, LONGEST_COMMON_NAME))
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
    except OSError as error:  # such as a parent that does not exist
        parent = os.path.dirname(path)
        is_missing = isinstance(error, FileNotFoundError)
        fix = f"create {parent}" if is_missing else f"make {parent} writable"
        raise UsageError(
            "service.directory_refused",
            f"cannot create {path}: {error.strerror}; {fix}, or name"
            " another directory with --dir, or with UNDERSTUDY_DIR in every terminal",
            path=path,
        ) from error
    found = os.lstat(path)  # a symbolic link could be pointed elsewhere after this check
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode):
        code, why = "not_a_directory", "is not a directory; remove it, or name another with --dir"
    elif found.st_uid != os.geteuid():
        code = "foreign_directory"
        why = (
            f"belongs to uid {found.st_uid} and this process runs as uid {os.geteuid()}; run every"
            " part as one user, or name another directory with --dir"
        )
    elif mode & 0o077:
        code = "open_directory"
        why = f"has mode {mode:04o} and must be 0700; run `chmod 700 {path}`"
    else:
        return path
    raise UsageError(f"service.{code}", f"{path} {why}", path=path)

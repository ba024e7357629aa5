"""The `gms` command: `serve`, `status`, `verify`, `drop`, `drop-kv`.

The hidden commands are the processes that `serve` starts: a server for each device and one for host
copies, and the two that keep and make host copies. Options and settings come first.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import click

from gms import names
from gms import status as statuses
from gms.server.devices import VISIBLE, devices_to_serve
from gms.server.memory_server import STALL_MS
from gms.server.server import DeviceProcess
from gms.vmm.host import HostMemory
from gms.vmm.interface import DeviceMemory
from plumbing.errors import UnreachableError, UsageError
from plumbing.pod import paths
from plumbing.pod.cli import Look, add_status, json_flag, options, run_async
from plumbing.pod.models import device_of, model_names, place_of
from plumbing.service.config import Option, Resolved, size_bytes, size_list
from plumbing.service.hosts import http_options
from plumbing.service.log import configure
from plumbing.service.process import arm_from_environment, raise_fd_limit
from plumbing.service.signals import SignalInbox
from plumbing.text import to_json

ONE_DEVICE = Option("device", str, None, "Only this device.")
FREE_TIMEOUT = Option(
    "timeout_s", float, 30.0, "How long in seconds to wait until the memory is free.", minimum=0.0
)

MEMORY = Option("memory", str, "host", "The kind of memory.", choices=("host", "cuda"))
DEVICES_BYTES = Option(
    "device_bytes", size_list, None,
    "Memory to use per device, e.g. 20GiB, or one size for each device, separated by commas. "
    "Default: 4GiB of host memory, or all of a GPU.",
)  # fmt: skip
STALL = Option(
    "stall_s", float, STALL_MS / 1000, "Longest time in seconds a writer may make no progress.",
    minimum=0.1,
)  # fmt: skip
HOST_MEMORY = Option(
    "host_memory", size_bytes, None,
    "Host memory for copies of the weights, split evenly between devices (in a pool: as the pool "
    "decides). Unset: no copies, no offloading.", minimum=1,
)  # fmt: skip
MODEL = Option(
    "model", str, (), "A model of the pod, which then has servers of its own on each device, such"
    " as HOST-0.MODEL. Repeatable.", env="UNDERSTUDY_MODELS", many=True,
)  # fmt: skip
SERVE = (
    paths.DIR,
    MEMORY,
    Option("devices", int, 1, "Number of devices, for host memory.", minimum=1, maximum=64),
    Option(
        "device",
        str,
        (),
        "UUIDs of the GPUs or MIG instances to serve, separated by commas; all visible ones unless"
        " given. Repeatable.",
        env="UNDERSTUDY_GPUS",
        many=True,
    ),
    MODEL,
    DEVICES_BYTES,
    HOST_MEMORY,
    STALL,
    *http_options(9401),
)
PLACE = Option(
    "place", str, (), "What to serve, HOST-0.MODEL. Repeatable. Default: the device.", many=True
)
SERVE_DEVICE = (
    paths.DIR,
    MEMORY,
    Option("device", str, help="The device's name."),
    PLACE,
    Option("device_bytes", size_bytes, None, "Memory to use.", minimum=1),
    STALL,
)  # fmt: skip


def sizes_of(devices: Sequence[str], sizes: tuple[int, ...] | None) -> dict[str, int]:
    """What may be used of each device; empty: unless given.

    Raises:
        UsageError: `config.device_sizes`.
    """
    if sizes is None:
        return {}
    if len(sizes) not in (1, len(devices)):
        raise UsageError(
            "config.device_sizes",
            f"--device-bytes has {len(sizes)} sizes, and there are {len(devices)} devices"
            f" ({', '.join(devices)}): give one size for all of them, or one for each",
        )
    return dict(zip(devices, sizes * (len(devices) // len(sizes)), strict=True))


HOST_DEVICE_BYTES = 4 << 30
NICE = 10  # no request waits for a copy
FDS_MIN = 256  # what the server of one device opens for one model of 130 slabs and its engines


@click.group()
def main() -> None:
    """GPU memory service: keeps one copy of the weights, which all engines map."""


@main.command()
@options(SERVE)
def serve(config: Resolved) -> None:
    """Run the memory service until SIGTERM."""
    from gms.server.supervisor import GmsSupervisor  # heavy, and only needed here

    configure("gms")
    arm_from_environment()
    limit = raise_fd_limit()
    if 0 <= limit < FDS_MIN:
        raise UsageError(
            "gms.too_few_descriptors",
            f"this process may open {limit} files, and the server of a device needs {FDS_MIN}:"
            " raise the limit (ulimit -Hn, or the container's nofile limit)",
        )
    directory = paths.runtime_dir(config["dir"])
    is_cuda = config["memory"] == "cuda"
    gpus = [word for words in config["device"] for word in words.split(",") if word]
    if gpus and not is_cuda:
        raise UsageError("config.needless_device", "--device requires --memory cuda")

    devices = devices_to_serve(gpus) if is_cuda else [f"HOST-{n}" for n in range(config["devices"])]
    models = model_names(config["model"]) or ("",)
    on = {device: [place_of(device, model) for model in models] for device in devices}
    places = [place_of(device, model) for model in models for device in devices]
    device_bytes = sizes_of(devices, config["device_bytes"])
    # The pool's books say how much of host memory each model may have.
    copies_bytes = config["host_memory"]
    if copies_bytes is not None and not config["model"]:
        copies_bytes = max(1, copies_bytes // len(devices))

    def command(device: str) -> list[str]:
        """How the next server of `device`, or of host copies, is started."""
        is_copies = device == names.COPIES
        flags: list[object] = [
            *("--dir", directory, "--device", device),
            *("--memory", "host" if is_copies else config["memory"]),
            *("--stall-s", config["stall_s"]),
        ]
        served = [names.offload_device(place) for place in places] if is_copies else on[device]
        flags += _places(served)
        if limit_bytes := copies_bytes if is_copies else device_bytes.get(device):
            flags += ["--device-bytes", limit_bytes]
        return _words("serve-device", flags)

    keeping = ["--dir", directory, "--device", names.COPIES, *_places(places)]
    supervisor = GmsSupervisor(
        directory,
        on,
        command,
        # A server sees its own device and nothing else.
        environment=lambda device: {VISIBLE: device_of(device)} if is_cuda else {},
        http_host=config["http_host"],
        http_port=config["http_port"],
        allowed_hosts=config["http_allowed_host"],
        keep_copies=None if copies_bytes is None else _words("keep-copies", keeping),
    )
    sys.exit(run_async(supervisor.run))


def _words(verb: str, flags: Iterable[object]) -> list[str]:
    return [sys.executable, "-m", "gms.cli", verb, *map(str, flags)]


def _places(places: Iterable[str]) -> list[str]:
    return [word for place in places for word in ("--place", place)]


@main.command("serve-device", hidden=True)
@options(SERVE_DEVICE)
def serve_device(config: Resolved) -> None:
    """The server of one device, or of all host copies; started by `serve`."""
    _as_child(config)
    # Before any loop runs: a driver may take seconds to initialise.
    memory, capacity_bytes = _memory(config)
    process = DeviceProcess(
        paths.runtime_dir(config["dir"]),
        config["place"] or (config["device"],),
        memory,
        capacity_bytes,
        # Host memory without a given limit has 4 GiB for weights, and for KV memory what the
        # machine has free.
        is_bounded=config["memory"] != "host" or config["device_bytes"] is not None,
        stall_ms=config["stall_s"] * 1000,
    )

    async def run() -> None:
        signals = SignalInbox()  # first: a SIGTERM during the start must leave no socket
        await process.start()
        try:
            await signals.get()
        finally:
            signals.close()
            await process.close()

    run_async(run)


def _as_child(config: Resolved) -> None:
    configure("gms", device_uuid=config["device"])
    arm_from_environment()


def _memory(config: Resolved) -> tuple[DeviceMemory, int]:
    wanted_bytes = config["device_bytes"]
    if config["memory"] == "host":
        return HostMemory(), wanted_bytes or HOST_DEVICE_BYTES
    from gms.vmm.cuda import CudaMemory

    cuda = CudaMemory(device_of(config["device"]))
    return cuda, min(wanted_bytes or cuda.capacity_bytes, cuda.capacity_bytes)


def _look(config: Resolved) -> Look:
    document = statuses.collect(config["dir"])
    away = [each for each in document["devices"] if not each["online"]]
    reasons = "; ".join(f"{each['device_uuid']}: {each['reason']}" for each in away)
    offline = UnreachableError("gms.offline", f"no server answers for {reasons}") if away else None
    return Look(document, statuses.render(document), offline)


add_status(
    main,
    _look,
    "Show what each device holds and who maps it.\n\n"
    "If a device's server does not answer, show what its journal says, and exit with code 3.",
)


@main.command()
@options((paths.DIR, ONE_DEVICE))
@json_flag
def verify(config: Resolved, as_json: bool) -> None:
    """Compare the committed bytes with what was written.

    Exit codes: 0 intact or empty, 1 altered or not verified, 3 unreachable, 4 no digest yet or
    recovering; with several devices, the worst of them.
    """
    from gms import upkeep

    document = upkeep.verify(config["dir"], config["device"])
    _show(document, as_json=as_json)
    sys.exit(upkeep.EXIT_CODES[document["result"]])


@main.command()
@options((paths.DIR, ONE_DEVICE))
@click.option("--epoch", help="Drop only if this is the committed epoch.")
@click.option(
    "--even-if-mapped",
    is_flag=True,
    help="Drop it even if engines map it; the memory is freed when they exit.",
)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@json_flag
def drop(
    config: Resolved, epoch: str | None, even_if_mapped: bool, yes: bool, as_json: bool
) -> None:
    """Take a device's committed weights out of service.

    The next engine loads them again.
    """
    from gms import upkeep

    name = upkeep.the_device(config["dir"], config["device"])
    _confirm(f"Drop the committed weights of {name}?", yes=yes)
    document = upkeep.drop(config["dir"], name, epoch=epoch, even_if_mapped=even_if_mapped)
    _show(document, as_json=as_json)


@main.command("drop-kv")
@options((paths.DIR, ONE_DEVICE, FREE_TIMEOUT))
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@json_flag
def drop_kv(config: Resolved, yes: bool, as_json: bool) -> None:
    """Free a device's KV memory that no engine uses.

    The next engine gets new memory and begins with an empty cache. The command is refused while an
    engine uses the memory.
    """
    from gms import upkeep

    name = upkeep.the_device(config["dir"], config["device"])
    _confirm(f"Free the KV memory of {name}, with the blocks in it?", yes=yes)
    document = upkeep.drop_kv(config["dir"], name, config["timeout_s"])
    _show(document, as_json=as_json)


def _confirm(question: str, *, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError("gms.not_confirmed", f"add --yes to confirm. {question}")
    click.confirm(question, abort=True)


def _show(document: dict[str, Any], *, as_json: bool) -> None:
    from gms import upkeep

    click.echo(to_json(document, indent=1) if as_json else upkeep.render(document))


@main.command("keep-copies", hidden=True)
@options((paths.DIR, ONE_DEVICE, PLACE))
def keep_copies(config: Resolved) -> None:
    """Keep the host copies of all devices' weights; started by `serve`."""
    from gms import host_copy

    _as_child(config)
    host_copy.keep_copies(config["dir"], config["place"])


@main.command("make-copy", hidden=True)
@options((paths.DIR, ONE_DEVICE))
def make_copy(config: Resolved) -> None:
    """Copy one device's weights to host memory; started by `keep-copies`."""
    from gms import host_copy

    _as_child(config)
    with contextlib.suppress(OSError):  # not allowed in every container
        os.nice(NICE)
    host_copy.make_copy(config["dir"], config["device"])


if __name__ == "__main__":
    main()

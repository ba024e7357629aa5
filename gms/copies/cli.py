"""The `gms` commands about copies in host memory: `offload`, and what `serve` starts for them."""

from __future__ import annotations

import contextlib
import os

import click

from gms.options import DIRECTORY, FREE_TIMEOUT, ONE_DEVICE
from plumbing.pod.cli import json_flag, options
from plumbing.service.config import Resolved
from plumbing.service.log import configure
from plumbing.service.process import arm_from_environment
from plumbing.text import to_json

NICE = 10  # nobody waits for a copy


@click.command()
@options((DIRECTORY, ONE_DEVICE, FREE_TIMEOUT))
@json_flag
def offload(config: Resolved, as_json: bool) -> None:
    """Free the weights of a device that no engine maps.

    Host memory has a sealed copy of them (`gms serve --host-memory`), from which the next engine
    brings them back.
    """
    from gms.operate import offload as operate

    document = operate.offload(config["dir"], config["device"], config["timeout_s"])
    click.echo(to_json(document, indent=1) if as_json else operate.render(document))


@click.command("keep-copy", hidden=True)
@options((DIRECTORY, ONE_DEVICE))
def keep_copy(config: Resolved) -> None:
    """Keep the host copy of one device's weights; started by `serve`."""
    from gms.copies.keeper import CopyKeeper, make_in_a_process

    configure("gms", device_uuid=config["device"])
    arm_from_environment()
    flags = ["--dir", config["dir"], "--device", config["device"]]
    CopyKeeper(config["dir"], config["device"], lambda: make_in_a_process(flags)).run()


@click.command("make-copy", hidden=True)
@options((DIRECTORY, ONE_DEVICE))
def make_copy(config: Resolved) -> None:
    """Copy one device's weights to host memory; started by `keep-copy`."""
    from gms.copies import maker

    configure("gms", device_uuid=config["device"])
    arm_from_environment()
    with contextlib.suppress(OSError):  # not allowed in every container
        os.nice(NICE)
    maker.make_copy(config["dir"], config["device"])

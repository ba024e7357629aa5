"""The host copies of devices' weights: `gms keep-copies` keeps them, `gms make-copy` makes one.

The keeper holds the copies' descriptors, as an engine holds those of the weights, so a restarted
server gets the memory back. It starts `make-copy` when the committed weights have no copy. It
touches nothing that it maps, so it takes no memory, and it never opens a device. No process waits
for it, so it polls.

The maker is a process of its own: on a GPU, reading takes a context, whose memory goes back with
the process. The copy is an epoch of another server, with the same slabs, tensors and identity.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from gms import messages as msg
from gms import names
from gms.client import Keeper, Reader, Writer, open_copy, open_session
from gms.messages import COPIER
from gms.server.devices import VISIBLE
from gms.status import ask, status_of
from plumbing.errors import UnderstudyError
from plumbing.pod.models import device_of
from plumbing.service.process import parent_environment

LOOK_S = 0.5  # a look is two questions to servers that answer in a millisecond
ANSWER_S = 5.0
# After a copy that could not be made: memory may be short for long, and a try takes a second.
RETRY_S = 10.0
# 1 TiB at 1 GiB/s takes 17 minutes. What takes longer is stopped or hung, and holds up every look.
MAKE_S_MAX = 3600.0

logger = logging.getLogger(__name__)


def keep_copies(directory: str, devices: Sequence[str]) -> None:
    """Keep the copies of the weights of `devices`, until the process is ended."""
    keepers = [CopyKeeper(directory, device) for device in devices]
    while True:
        for each in keepers:
            each.try_to_look()
        time.sleep(LOOK_S)


class CopyKeeper:
    """The copy of one device's weights; `look` does what is due, and never raises for long."""

    def __init__(self, directory: str, device: str) -> None:
        self._directory, self._device = directory, device
        self._host = names.offload_device(device)
        self._copy: Reader | None = None
        self._keeper: Keeper | None = None
        self._maker: subprocess.Popen[bytes] | None = None
        self._retry_s = 0.0  # no maker is started before; while one runs, it is killed then
        self._said = ""

    def try_to_look(self) -> None:
        try:
            self.look()
        except (UnderstudyError, OSError) as error:  # a server that restarts, a shortage
            self._say(f"the host copy of {self._device} is not maintained: {error}")

    def look(self) -> None:
        """Hold the copy that there is; have one made if it is not of what is committed.

        Raises:
            UnderstudyError: a server cannot be asked, or the copy not be held.
        """
        if self._is_being_made():
            return
        weights, copy = (
            status_of(self._directory, each, ANSWER_S) for each in (self._device, self._host)
        )
        if copy["state"] != "committed":
            # A server that has died gets the copy from our keeper.
            if copy["state"] == "empty" and weights["state"] == "committed":
                self.close()
                if time.monotonic() >= self._retry_s:
                    self._maker = self._make()
                    self._retry_s = time.monotonic() + MAKE_S_MAX
            elif copy["state"] == "empty" and copy["superseded_bytes"]:
                self.close()  # it was dropped, and its memory is free once we leave
            return
        if weights["state"] == "committed" and not _is_same(weights, copy):
            self.close()
            self._drop(copy["epoch"])
        elif self._copy is None or self._copy.epoch != copy["epoch"]:
            self.close()
            self._hold(is_digested=copy["digest"] != "pending")

    def close(self) -> None:
        """Let the copy go."""
        if self._keeper is not None:
            self._keeper.close()
        if self._copy is not None:
            self._copy.close()
        self._keeper = self._copy = None

    def _hold(self, *, is_digested: bool) -> None:
        me = msg.AttachMsg(msg.COPIER, f"gms-keep-{os.getpid()}", "ro")
        copy = open_copy(self._directory, self._device, me)
        # Who finds a copy without a digest computes it: its maker has left.
        copy.is_author = not is_digested
        self._copy, self._keeper = copy, Keeper(copy, on_change=logger.warning)
        self._keeper.start()
        self._say(f"host memory has a copy of the weights of {self._device}: {copy.epoch}")

    def _drop(self, copy: str) -> None:
        """It stands for nothing any more; the next look finds room for another one."""
        drop = msg.DropMsg(copy, even_if_mapped=True)
        ask(self._directory, self._host, drop, msg.DroppedMsg, ANSWER_S)

    def _make(self) -> subprocess.Popen[bytes]:
        """Start `gms make-copy`, which sees its own device and nothing else."""
        flags = ["--dir", self._directory, "--device", self._device]
        seen = {} if names.is_host(self._device) else {VISIBLE: device_of(self._device)}
        return subprocess.Popen(
            [sys.executable, "-m", "gms.cli", "make-copy", *flags],
            env={**os.environ, **parent_environment(), **seen},
            stdin=subprocess.DEVNULL,
        )

    def _is_being_made(self) -> bool:
        """Whether the maker runs; what it left, and when it is too late, is seen to here."""
        if self._maker is None:
            return False
        code, now_s = self._maker.poll(), time.monotonic()
        if code is None:
            if now_s > self._retry_s:
                self._maker.kill()
            return True
        self._maker, self._retry_s = None, now_s + (RETRY_S if code else 0.0)
        if code:
            self._say(
                f"the weights of {self._device} could not be copied to host memory (exit code "
                f"{code}); trying again every {RETRY_S:g} s"
            )
        return False

    def _say(self, sentence: str) -> None:
        if sentence != self._said:
            self._said = sentence
            logger.warning(sentence)


def _is_same(weights: dict[str, Any], copy: dict[str, Any]) -> bool:
    """As far as is known: two digests that differ are two loads of one checkpoint."""
    if any(weights[key] != copy[key] for key in ("layout_hash", "identity")):
        return False
    return "pending" in (weights["digest"], copy["digest"]) or weights["digest"] == copy["digest"]


WAIT_S = 10.0  # for the memory of the copy before this one


def make_copy(directory: str, device: str) -> str:
    """Copy what is committed on `device`; returns the copy's epoch.

    Raises:
        UnderstudyError: nothing is committed, host memory has too little room, …
    """
    me = msg.AttachMsg(COPIER, f"gms-copy-{os.getpid()}", "ro")
    source = open_session(directory, device, me)
    assert isinstance(source, Reader)  # it asked for `ro`
    with source:
        wait_ms = round(WAIT_S * 1000)
        to = replace(me, mode="rw_or_ro", identity=source.identity, wait_ms=wait_ms)
        target = open_session(directory, names.offload_device(device), to)
        assert isinstance(target, Writer)
        with target:
            target.copy(source)
            with target.commit(source.identity) as copy:
                epoch: str = copy.epoch
                return epoch

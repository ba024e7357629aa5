"""Makes the host copy of a device's committed weights: `gms make-copy`, which ends when it is done.

A process of its own: on a GPU, reading takes a context, whose memory goes back with the process.
The copy is an epoch of another server, of host memory, with the same slabs, tensors and identity.
"""

from __future__ import annotations

import os

from gms import names
from gms.client import Reader, Writer, open_session
from gms.messages import COPIER
from plumbing.errors import InvariantError

WAIT_S = 10.0  # for the memory of the copy that this one replaces


def make_copy(directory: str, device: str) -> str:
    """Copy what is committed on `device`; returns the copy's epoch.

    Raises:
        UnderstudyError: nothing is committed, host memory has too little room, …
    """
    me = f"gms-copy-{os.getpid()}"
    source = open_session(
        directory, device, engine=COPIER, incarnation=me, mode="ro", identity=None, wait_s=0
    )
    if not isinstance(source, Reader):
        raise InvariantError("a reader was asked for")
    with source:
        target = open_session(
            directory,
            names.offload_device(device),
            engine=COPIER,
            incarnation=me,
            mode="rw",
            identity=source.identity,
            wait_s=WAIT_S,
            replace=True,
        )
        if not isinstance(target, Writer):
            raise InvariantError("a writer was asked for")
        with target:
            target.copy(source)
            with target.commit(source.identity) as copy:
                epoch: str = copy.epoch
                return epoch

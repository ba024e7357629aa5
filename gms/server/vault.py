"""The physical memory that one device's server holds: per epoch, its slabs in order.

Used by the driver thread, so it needs no locks and may block; another thread calls only `export`,
of epochs that no longer change. It decides nothing: the machine says what to create, seal and give
up.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence

from gms import epoch_file
from gms.manifest import check_manifest
from gms.vmm.interface import Allocation, DeviceMemory, export_all, release_all
from plumbing.errors import UnderstudyError
from plumbing.pod.paths import SLAB_PREFIX
from plumbing.wire.fds import OwnedFd, close_all


class Vault:
    """Slabs by epoch."""

    def __init__(self, memory: DeviceMemory, directory: str) -> None:
        self.memory = memory
        self._directory = directory
        self._slabs: dict[str, list[Allocation]] = {}

    def open_epoch(self, epoch: str, file_name: str) -> None:
        """Create the file of a new epoch.

        Raises:
            UnderstudyError: `gms.epoch_file`.
        """
        try:
            epoch_file.create(os.path.join(self._directory, file_name))
        except OSError as error:
            raise UnderstudyError(
                "gms.epoch_file",
                f"cannot create {file_name} in {self._directory}: {error.strerror}; free space",
            ) from error
        self._slabs[epoch] = []

    def mark_history(self, file_name: str) -> None:
        """Mark an epoch's file as out of service.

        Raises:
            UnderstudyError: `gms.epoch_file`.
        """
        try:
            epoch_file.mark_history(os.path.join(self._directory, file_name))
        except OSError as error:
            raise UnderstudyError(
                "gms.epoch_file", f"cannot mark {file_name} as out of service: {error.strerror}"
            ) from error

    def create(self, epoch: str, size_bytes: int) -> OwnedFd:
        """One more slab; returns a writable descriptor for its writer.

        Raises:
            UnderstudyError: `gms.driver_failed`, …
        """
        slabs = self._slabs[epoch]
        slab = self.memory.create(size_bytes, _slab_name(epoch, len(slabs)))
        try:
            fd = slab.export(writable=True)
        except BaseException:
            slab.release()
            raise
        slabs.append(slab)
        return fd

    def seal(self, epoch: str, manifest: bytes) -> int:
        """Check the manifest and seal every slab; returns the number of tensors.

        Raises:
            ProtocolError: `gms.bad_manifest`.
            UnderstudyError: `gms.still_writable`.
        """
        slabs = self._slabs[epoch]
        tensors = check_manifest(manifest, [slab.size_bytes for slab in slabs])
        for slab in slabs:
            slab.seal()
        return tensors

    def adopt(
        self, epoch: str, fds: Sequence[OwnedFd], slab_sizes: Sequence[int], manifest: bytes
    ) -> int:
        """Check and hold a survivor's epoch; takes `fds`; returns the number of tensors.

        Raises:
            ProtocolError: `gms.bad_manifest`.
            UnderstudyError: `gms.bad_slab`, one has another size, or is writable, or (host memory)
                is not the one that was created for its place.
        """
        slabs: list[Allocation] = []
        rest = deque(fds)
        try:
            tensors = check_manifest(manifest, slab_sizes)
            for index, size_bytes in enumerate(slab_sizes):
                slabs.append(self.memory.adopt(rest.popleft(), size_bytes))
                slabs[-1].check(_slab_name(epoch, index))
        except BaseException:
            close_all(rest)
            release_all(slabs)
            raise
        self._slabs[epoch] = slabs
        return tensors

    def export(self, epoch: str) -> list[OwnedFd]:
        """Read-only descriptors of every slab, in order; the caller owns them.

        Raises:
            UnderstudyError: `gms.driver_failed`, for example without descriptors left.
        """
        slabs = self._slabs.get(epoch, ())  # empty: it was given up meanwhile
        return export_all(slabs, writable=False)

    def take(self, epoch: str) -> list[Allocation]:
        """Give up an epoch's slabs: the caller releases them, where that may take long."""
        return self._slabs.pop(epoch, [])

    def close(self) -> None:
        """Release everything; memory lives on where a process maps it."""
        for epoch in list(self._slabs):
            release_all(self._slabs.pop(epoch))


def _slab_name(epoch: str, index: int) -> str:
    """The name that a slab is created with: unique, so that none passes for another."""
    return f"{SLAB_PREFIX}{epoch[:8]}-{index}"

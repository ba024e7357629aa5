"""Reports progress to the memory service while vLLM's loader is running.

The service gives up a writer that is silent for too long, and a load may take minutes without a
chance to report: one tensor from a slow disk, or a repack. So a thread reports, but only while
there is a sign of life: the loading thread uses CPU, or this process reads. A load that hangs on a
dead file system falls silent, as it should.

Knows nothing of vLLM. The figures may lag; what matters is that they are sent.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

from gms.client import Writer
from plumbing.errors import UnderstudyError

logger = logging.getLogger(__name__)

# A tenth of the shortest useful timeout of a memory service.
PERIOD_S = 1.0
# Of the loading thread, between two reports: waiting alone costs less than this.
ALIVE_CPU_S = 0.001


class Meter:
    """How far one writer is with its load, in bytes read and bytes moved.

    Never decreases: the service only counts growth as progress.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer, self._done_bytes, self._total_bytes = writer, 0, 0

    def expect(self, nbytes: int) -> None:
        """Add `nbytes` to the total."""
        self._total_bytes += nbytes

    def add(self, nbytes: int) -> None:
        """Add `nbytes` to what is done."""
        self._done_bytes += nbytes

    def report(self) -> None:
        self._writer.progress(self._done_bytes, max(self._done_bytes, self._total_bytes))

    def counted(self, weights: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """`weights` (names and tensors), counted as they pass."""
        for name, tensor in weights:
            self.add(tensor.nbytes)
            yield name, tensor


class Pulse:
    """Reports for the writer of `meter` while its `with` block runs on the loading thread."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load-pulse", daemon=True)
        self._seen = self._signs()

    def beat(self) -> bool:
        """Report if there was a sign of life since the last beat; returns whether there was."""
        cpu_s, read_bytes = self._signs()
        is_alive = cpu_s - self._seen[0] > ALIVE_CPU_S or read_bytes != self._seen[1]
        self._seen = cpu_s, read_bytes
        if is_alive:
            self._meter.add(1)  # in case nothing counted has passed
            self._meter.report()
        return is_alive

    def __enter__(self) -> Pulse:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(PERIOD_S):
            try:
                self.beat()
            except UnderstudyError as error:  # the loading thread will get this error too
                logger.warning("the memory service is gone while weights load: %s", error.message)
                return

    def _signs(self) -> tuple[float, int]:
        """CPU seconds of the loading thread; bytes that this process has read from disk."""
        with open("/proc/self/io", "rb") as file:
            fields = dict(line.split(b": ") for line in file.read().splitlines())
        return time.clock_gettime(self._clock), int(fields[b"read_bytes"])

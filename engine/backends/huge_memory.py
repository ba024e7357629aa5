"""This process's own memory in huge pages, so that the kernel frees it sooner when the process dies.

No engine is granted the lock before the last process of the dead one is gone, and pages of 4 KiB
are freed one by one. What glibc allocates gets huge pages from the kernel (`incarnation.py` asks
for them); Python's own arenas, the other half, and what libraries map themselves do not. So this is
done once, when a backend is prepared and before anything waits for it: of the 45 ms of CPU time
that a process of vLLM takes to die, 20 go.

MADV_COLLAPSE (Linux 6.1) needs no privilege and ignores the administrator's setting, so a kernel
whose huge pages are off (`never`) is asked for none. It moves pages while other threads may use
them. What a driver has pinned stays where it is.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator

from engine.backends.free_memory import resident_pages
from gms.client import HUGE_BYTES, collapse, may_have_huge_pages

logger = logging.getLogger(__name__)

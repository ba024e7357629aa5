"""The page on which a backend shows its progress, over real descriptors and processes."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
import sys

import pytest

from engine.backends.process import PROGRESS_ENV, ProgressPage
from tests.engine.pod import environment
from tests.helpers import open_fds

BACKEND = """
import os
from engine.backends.process import PROGRESS_ENV, ProgressPage
number = int(os.environ[PROGRESS_ENV])
try:
    os.ftruncate(number, 0)
except OSError as error:
    print(error.errno)
page = ProgressPage.take()
assert PROGRESS_ENV not in os.environ
page.count = 2**63
"""


def test_supervisor_sees_what_a_backend_counts():
    """Goal: another process's count arrives, and it cannot shorten the page. Method: a child."""
    page, lent = ProgressPage.create()
    assert lent is not None
    with lent:
        done = subprocess.run(
            [sys.executable, "-c", BACKEND],
            env=environment(**{PROGRESS_ENV: str(lent.fileno())}),
            pass_fds=[lent.fileno()],
            capture_output=True,
            text=True,
            check=True,
        )
    assert int(done.stdout) == errno.EPERM
    assert page.count == 2**63
    page.close()


def test_page_leaves_no_descriptor_open():
    """Goal: as many descriptors after a launch as before it. Method: count them."""
    before = open_fds(os.getpid())
    page, lent = ProgressPage.create()
    assert lent is not None
    environ = {PROGRESS_ENV: str(lent.detach())}
    backend = ProgressPage.take(environ)
    assert environ == {}
    backend.count = 7
    assert page.count == 7
    page.close()
    backend.close()
    assert open_fds(os.getpid()) == before


@pytest.mark.parametrize("number", ["", "x", "999999", "-1"])
def test_backend_without_a_page_counts_for_itself(number):
    """Goal: no page is no failure. Method: variables that name no descriptor."""
    page = ProgressPage.take({PROGRESS_ENV: number})
    page.count += 1
    assert page.count == 1


def test_supervisor_without_descriptors_goes_without_a_page():
    """Goal: a shortage of descriptors ends no launch here. Method: a limit that is reached."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    kept = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                kept.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
        page, lent = ProgressPage.create()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in kept:
            os.close(fd)
    assert lent is None
    assert page.count == 0

"""Each of several test processes has ports of its own, so that tests can run side by side.

A test asks the kernel for a free port and starts a server on it a moment later; two processes that
do so meet once in a while. In a network namespace of its own nobody else is there to meet. Only
root may make one: where it is refused, tests should run one after the other (`WORKERS=0`).

A test process runs in Python's development mode; what it starts runs as users run it, which takes a
quarter less of the machine.

Hypothesis judges no test by its speed: on a busy machine an example may take longer than 200 ms,
and less when it is repeated.

The simulations come first, then the files that have slow tests: each keeps one test process busy
for long, and at the end the others would wait for it.

A test that fails prints the last events of the pods that it has run, in the order of time: CI keeps
no logs of theirs.

And Ctrl-C means what it means at a terminal: a shell that starts the tests in the background lets
them, and all that they start, ignore it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import inspect
import json
import os
import signal
import socket
import struct
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path

import pytest

CLONE_NEWNET = 0x40000000  # linux/sched.h
SIOCSIFFLAGS = 0x8914  # linux/sockios.h
IFF_UP = 0x1  # linux/if.h
WORKER_ENV = "PYTEST_XDIST_WORKER"
SIMULATIONS = Path(__file__).parent / "sim"
EVENTS_SHOWN = 60  # some ten seconds of a pod


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if find_spec("hypothesis") is not None:  # vLLM's environment has none
        be_patient()
    if WORKER_ENV in os.environ:
        os.environ.pop("PYTHONDEVMODE", None)
        if enter_own_network():
            bring_up("lo")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: (SIMULATIONS not in item.path.parents, item.path not in slow))


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine runs on a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    directory = getattr(item, "funcargs", {}).get("tmp_path")
    if report.failed and directory is not None:
        logs = (path for path in directory.rglob("log/*.log") if path.is_file())  # no pipe
        events = sorted(each for path in logs for each in events_in(path))
        report.sections.append(("last events of its pods", "\n".join(events[-EVENTS_SHOWN:])))
    return report


def events_in(log: Path) -> list[str]:
    found = []
    for line in log.read_text(errors="replace").splitlines():
        if line.startswith('{"ts"') and '"event"' in line:
            with contextlib.suppress(ValueError):  # its writer was killed
                said = json.loads(line)
                found.append(f"{said['ts']} {log.stem}: {said['msg']}"[:200])
    return found


def be_patient() -> None:
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "patient", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("patient")


def enter_own_network() -> bool:
    """Whether this thread, and all that it starts from now on, has a network of its own now."""
    return ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) == 0


def bring_up(interface: str) -> None:
    request = struct.pack("16sh14x", interface.encode(), IFF_UP)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, SIOCSIFFLAGS, request)

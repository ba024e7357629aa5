"""PodFacts of a machine on which everything is well, to be spoilt one at a time."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from pool.pool_file import parse, settle
from pool.settings import digests
from understudy.doctor.checks import CHECKS
from understudy.doctor.facts import (
    Directory,
    FdUse,
    Finding,
    GpuFacts,
    Gpus,
    MachineFacts,
    PodFacts,
    PoolFileFacts,
    Port,
    Process,
    SocketFile,
    SocketListener,
)

HERE = (1, 2)
GPU = "GPU-5a0f1b2c-0000-4000-8000-00000000000a"
OTHER_GPU = "GPU-5a0f1b2c-1111-4111-8111-11111111111b"
LOCKSERVER, GMS, ENGINE, GATEWAY = (
    Process(10, "lockserver"),
    Process(20, "gms"),
    Process(30, "engine"),
    Process(40, "gateway"),
)
STRANGER = Process(99, "jupyter")

POOL_PATH = "/etc/pool.yaml"
POOL_FILE = settle(
    parse(
        POOL_PATH,
        """
devices: [HOST-0]
margin: 1GiB
models:
  chat: {model: /models/chat}
  coder: {model: /models/coder}
""",
    )
)
POOL: dict[str, Any] = {
    "problems": [],
    "recovering": False,
    "changed": {},
    "file": {"path": POOL_PATH, "digests": digests(POOL_FILE)},
    "devices": [
        {
            "device": "HOST-0",
            "total_bytes": 8 << 30,
            "margin_bytes": 1 << 30,
            "outside_bytes": 0,
        }
    ],
    "models": [
        {
            "model": name,
            "state": "awake",
            "fault": None,
            "recovering": False,
            "pinned": False,
            "estimated": False,
            "oldest_ticket_ms": None,
            "bound_ms": None,
            "engines": [],
            "sizes": {
                "base": {"HOST-0": 1 << 30},
                "weights": {"HOST-0": 2 << 30},
                "kv": {"HOST-0": 3 << 30},
            },
        }
        for name in POOL_FILE.models
    ],
}

VIEW: dict[str, Any] = {
    "lockserver": {"locks": {}, "service": {"active": {}}, "supervisors": [], "mode": "gateway"},
    "gateway": {"load": {}, "accepting": True, "problems": []},
    "gms": [{"device_uuid": "HOST-0", "capacity_bytes": 4 << 30, "epoch": "e"}],
    "engines": [{"engine": {"id": "engine-0"}, "lock": {"connected": True}}],
    "pool": POOL,
}

WELL = PodFacts(
    directory=Directory(
        "/run/understudy",
        owner_uid=10,
        our_uid=10,
        identity=HERE,
        filesystem="tmpfs",
    ),
    view=VIEW,
    sockets=(
        SocketFile("engine_engine-0.http.sock", True, ENGINE.pid, 0o600),
        SocketFile("engine_engine-0.sock", True, ENGINE.pid),
        SocketFile("gateway.sock", True, GATEWAY.pid),
        SocketFile("gms_HOST-0_weights.sock", True, GMS.pid),
        SocketFile("lockserver.sock", True, LOCKSERVER.pid),
    ),
    listeners=(
        SocketListener("engine_engine-0.http.sock", ENGINE, HERE),
        SocketListener("engine_engine-0.sock", ENGINE, HERE),
        SocketListener("gateway.sock", GATEWAY, HERE),
        SocketListener("gms_HOST-0_weights.sock", GMS, HERE),
        SocketListener("lockserver.sock", LOCKSERVER, HERE),
    ),
    limits=(FdUse(LOCKSERVER, 20_000, 20_000, 30),),
    ports=(Port(9400, "probes", "--lockserver-port", "lockserver", True, LOCKSERVER),),
    machine=MachineFacts(
        "6.18",
        clock_source="tsc",
        memory_bytes=16 << 30,
        memory_limit="this machine's memory",
        shm_bytes=8 << 30,
        termination_log="/dev/termination-log",
    ),
    gpus=Gpus((GpuFacts(GPU, is_persistent=True, compute_mode="default"),), "580.00"),
    pids=frozenset({10, 20, 21, 30, 31, 40, 41}),
    served=("HOST-0",),
    packages={"vllm": "0.32.0"},
    tls_files={"UNDERSTUDY_TLS_CERT is /etc/tls.crt": None},
    pool_file=PoolFileFacts(POOL_PATH, POOL_FILE, digests(POOL_FILE)),
)

NO_POD = replace(
    WELL,
    view={
        "lockserver": {"name": "lockserver", "error": "gone"},
        "gateway": None,
        "gms": [],
        "engines": [],
    },
    sockets=(),
    listeners=(),
    ports=(),
    pids=frozenset(),
    served=(),
    tls_files={},
    pool_file=None,
)

_BY_ID = {judge.__name__: judge for _, judge in CHECKS}


def ask(check: str, facts: PodFacts) -> Finding:
    """What the check of this id finds."""
    return _BY_ID[check](facts)


def spoilt(facts: PodFacts = WELL, **changes: Any) -> PodFacts:
    """`facts` with other fields; `directory__mode=…` is a field of a field."""
    for name, value in changes.items():
        outer, _, inner = name.partition("__")
        if inner:
            value = replace(getattr(facts, outer), **{inner: value})
        facts = replace(facts, **{outer: value})
    return facts

"""Every check as pure code: what it reports, what it names, and which fix it gives."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.understudy.doctor.facts import (
    ENGINE,
    GMS,
    GPU,
    HERE,
    LOCKSERVER,
    NO_POD,
    OTHER_GPU,
    STRANGER,
    VIEW,
    WELL,
    ask,
    spoilt,
)
from understudy.doctor.checks import CHECKS, document, examine, is_well, lines
from understudy.doctor.facts import (
    FdUse,
    GpuFacts,
    Gpus,
    HeldMemory,
    PodFacts,
    Port,
    Process,
    SocketFile,
    SocketListener,
    TlsFile,
)
from understudy.doctor.findings import FindingStatus

FAIL, WARN, PASS, SKIP = (
    FindingStatus.FAIL,
    FindingStatus.WARN,
    FindingStatus.PASS,
    FindingStatus.SKIP,
)
ELSEWHERE = SocketListener("engine_engine-1.sock", Process(40, "engine"), (7, 8))
REPLACED = SocketListener("engine_engine-1.sock", Process(40, "engine"), HERE)
UNSEEN = SocketListener("engine_engine-1.sock")
SECOND = SocketListener("lockserver.sock", Process(50, "lockserver"), HERE)
NO_DRIVER = Gpus(problem="no driver here")
SMALL_PAGES = spoilt(kernel__has_huge_slabs=False, kernel__shared_huge_pages="never")
TWIN = SocketListener("gateway.sock", Process(60, "gateway"), HERE)
OPENED = SocketFile("engine_engine-0.http.sock", True, 30, 0o666)
DIRECT_LOCK = {"lockserver": {**VIEW["lockserver"], "mode": "direct"}}
DIRECT = {**VIEW, **DIRECT_LOCK, "gateway": None}
BORROWERS = [{"gateway": "a", "pid": 40}, {"gateway": "b", "pid": 60}]
SILENT = [{"gateway": "a", "pid": 40, "silent": True, "accepting": {"for_ms": 9}}]
IN_SILENCE = {
    **VIEW,
    "lockserver": {**VIEW["lockserver"], "gateways": SILENT},
    "gateway": {"error": "no answer"},
}
TWO_BORROW = {**VIEW, "lockserver": {**VIEW["lockserver"], "gateways": BORROWERS}}
NO_SERVICE = {**VIEW, "lockserver": {**VIEW["lockserver"], "service": {}}, "gateway": None}
CLOSED = {**VIEW, "gateway": {"accepting": False, "problems": ["no descriptors"]}}
DEAF = {**VIEW, "engines": [{"engine": {"id": "engine-1"}, "lock": {"connected": False}}]}
UNPROVED = {**VIEW, "engines": [{**VIEW["engines"][0], "problems": ["the self-test failed"]}]}
AWAY = {**VIEW, "lockserver": {"locks": {}, "service": {"active": {"problem": "pid 9 has it"}}}}
OF_TWO_MODELS = {
    **VIEW,
    "gms": [{"device_uuid": f"HOST-0.{model}", "capacity_bytes": 4 << 30} for model in ("a", "b")],
}
BLIND = {
    **VIEW,
    "lockserver": {
        "locks": {},
        "supervisors": [{"engine": "engine-0", "connected": True, "pidfd_source": "none"}],
    },
}


def elsewhere(**changes: object) -> PodFacts:
    """Seen from the lock server's container: nobody else's processes are visible."""
    sockets = tuple(
        each if each.name == "lockserver.sock" else replace(each, pid=None) for each in WELL.sockets
    )
    return spoilt(sockets=sockets, **changes)


def listens(*more: SocketListener) -> PodFacts:
    return spoilt(listeners=(*WELL.listeners, *more))


def gpus(*holds: HeldMemory, **differences: object) -> PodFacts:
    """A pod that serves the only GPU, which is not as it should be."""
    gpu = GpuFacts(
        GPU, **{"is_persistent": True, "compute_mode": "default", **differences}, holds=holds
    )
    return spoilt(gpus=Gpus((gpu,), "580.00"), served=(GPU,))


def limits(hard: int, count: int = 0) -> PodFacts:
    return spoilt(limits=(FdUse(GMS, hard, hard, count),))


def port(owner: Process | None, part: str = "engine-1", *, is_taken: bool = True) -> PodFacts:
    return spoilt(ports=(Port(9411, f"probes of {part}", "--engine-port", part, is_taken, owner),))


IDLE_KV = {"state": "idle", "pool": "p", "pool_bytes": 2**31}


def with_kv(kv: dict | None, **more: object) -> PodFacts:
    """A pod whose device has this KV memory, and `more` in its document."""
    return spoilt(view={**VIEW, "gms": [{**VIEW["gms"][0], "kv": kv, **more}]})


@pytest.mark.parametrize(
    ("check", "facts", "status", "words"),
    [
        ("directory", WELL, PASS, "is private"),
        ("directory", spoilt(directory__kind="missing"), PASS, "does not exist yet"),
        (
            "directory",
            spoilt(directory__kind="missing", directory__can_be_made=False),
            FAIL,
            "cannot be created",
        ),
        ("directory", spoilt(directory__kind="a symbolic link"), FAIL, "is a symbolic link"),
        ("directory", spoilt(directory__owner_uid=0), FAIL, "uid 0, but this process is uid 10"),
        ("directory", spoilt(directory__mode=0o755), FAIL, "mode 0755"),
        ("path_length", WELL, PASS, "engine_engine-0.http.sock"),
        ("path_length", spoilt(directory__path="/" + 84 * "x"), FAIL, "of 107 bytes"),
        # The GPU's UUID makes the path too long before any server has tried.
        (
            "path_length",
            spoilt(NO_POD, directory__path="/" + 60 * "x"),
            FAIL,
            f"gms_{GPU}_weights.sock",
        ),
        ("shared", WELL, PASS, "all 5 listening sockets"),
        ("shared", listens(ELSEWHERE), FAIL, "pid 40 (engine) has engine_engine-1.sock in another"),
        ("shared", listens(ELSEWHERE), FAIL, "device 7 inode 8 there, device 1 inode 2 here"),
        ("shared", listens(REPLACED), FAIL, "removed or replaced"),
        ("shared", listens(UNSEEN), FAIL, "a process that is not visible here listens"),
        (
            "shared",
            spoilt(NO_POD, listeners=(ELSEWHERE,), directory__identity=None),
            FAIL,
            "there, nothing here",
        ),
        (
            "shared",
            spoilt(view=DEAF),
            FAIL,
            "engine-1 cannot reach the lock server, which is running",
        ),
        ("shared", spoilt(listens(UNSEEN), directory__owner_uid=0), SKIP, "another user"),
        ("shared", NO_POD, SKIP, "no part of a pod"),
        ("shared", spoilt(NO_POD, directory__kind="missing"), SKIP, "not exist yet"),
        (
            "shared",
            spoilt(NO_POD, directory__filesystem="overlay", directory__is_mounted=False),
            WARN,
            "this container alone",
        ),
        ("one_lockserver", WELL, PASS, "pid 10 (lockserver)"),
        ("one_lockserver", listens(SECOND), FAIL, "pid 10 (lockserver), pid 50 (lockserver)"),
        ("one_lockserver", NO_POD, SKIP, "no lock server"),
        ("flock", WELL, PASS, "tmpfs"),
        ("flock", spoilt(directory__flock_problem="No locks available"), FAIL, "No locks"),
        ("flock", spoilt(directory__kind="missing"), SKIP, "does not exist"),
        ("flock", spoilt(directory__owner_uid=0), SKIP, "cannot be read"),
        ("stale_sockets", WELL, PASS, "none (5 sockets"),
        ("stale_sockets", spoilt(sockets=(SocketFile("x.sock", False),)), WARN, "x.sock"),
        ("gateway", WELL, PASS, "accepts"),
        ("gateway", NO_POD, SKIP, "not known"),
        ("gateway", spoilt(view=DIRECT), SKIP, "direct mode"),
        ("gateway", spoilt(view={**VIEW, **DIRECT_LOCK}), FAIL, "beside a lock server in direct"),
        ("gateway", spoilt(view=NO_SERVICE), SKIP, "no service address"),
        ("gateway", spoilt(view={**VIEW, "gateway": None}), FAIL, "requests get a 503"),
        ("gateway", spoilt(view={**VIEW, "gateway": {"error": "gone"}}), FAIL, "503: gone"),
        ("gateway", spoilt(view=IN_SILENCE), FAIL, "its child serves: no answer"),
        ("gateway", spoilt(view=CLOSED), FAIL, "does not accept connections: no descriptors"),
        ("one_gateway", WELL, PASS, "pid 40 (gateway)"),
        ("one_gateway", NO_POD, SKIP, "no gateway is running"),
        ("one_gateway", listens(TWIN), FAIL, "pid 40 (gateway), pid 60 (gateway)"),
        ("one_gateway", spoilt(view=TWO_BORROW), WARN, "2 gateways: pids 40, 60"),
        ("private_sockets", WELL, PASS, "engine_engine-0.http.sock: private"),
        ("private_sockets", NO_POD, SKIP, "no engine is active behind"),
        ("private_sockets", spoilt(view=DIRECT), FAIL, "engines serve a gateway, and the lock"),
        ("private_sockets", spoilt(NO_POD, sockets=(OPENED,)), FAIL, "has mode 0666"),
        ("engines", WELL, PASS, "no engine"),
        ("engines", NO_POD, SKIP, "no engine answers"),
        ("engines", spoilt(view=UNPROVED), WARN, "engine-0: the self-test failed"),
        ("tls_files", WELL, PASS, "/etc/tls.crt"),
        ("tls_files", spoilt(tls_files=()), SKIP, "names no certificate"),
        ("tls_files", spoilt(tls_files=(TlsFile("A", "/c", "gone"),)), FAIL, "A is /c: gone"),
        ("peer_pidfd", WELL, PASS, "6.18"),
        ("peer_pidfd", spoilt(kernel__has_peer_pidfd=False), WARN, "no SO_PEERPIDFD"),
        (
            "peer_pidfd",
            spoilt(kernel__has_peer_pidfd=False, view=BLIND),
            FAIL,
            "cannot see the processes of engine-0",
        ),
        (
            "peer_pidfd",
            spoilt(kernel__has_peer_pidfd=False, kernel__has_pidfd_open=False),
            FAIL,
            "and no pidfd_open",
        ),
        ("pidfd_open", WELL, PASS, ""),
        ("pidfd_open", spoilt(kernel__has_pidfd_open=False), FAIL, "refused"),
        ("start_method", WELL, PASS, "spawn"),
        (
            "start_method",
            spoilt(environ={"VLLM_WORKER_MULTIPROCESSING_METHOD": "fork"}),
            WARN,
            "is fork",
        ),
        ("descriptors", WELL, PASS, "20000"),
        ("descriptors", limits(1023), FAIL, "pid 20 (gms) may open 1023 descriptors"),
        ("descriptors", limits(1024), WARN, "4096 recommended"),
        ("descriptors", limits(4096), PASS, "4096"),
        ("descriptors", limits(4096, 3500), WARN, "has 3500 of 4096 open"),
        ("huge_pages", WELL, PASS, "huge pages"),
        ("huge_pages", spoilt(SMALL_PAGES, view=NO_POD.view), SKIP, ""),
        ("huge_pages", SMALL_PAGES, WARN, "shmem_enabled is never"),
        ("huge_pages", spoilt(SMALL_PAGES, kernel__shared_huge_pages=None), WARN, "transparent"),
        ("clock_source", WELL, PASS, "tsc"),
        ("clock_source", spoilt(kernel__clock_source="hpet"), WARN, "hpet"),
        ("clock_source", spoilt(kernel__clock_source=None), SKIP, ""),
        ("shared_memory", WELL, PASS, "8.0 GiB"),
        ("shared_memory", spoilt(machine__shm_bytes=64 << 20), WARN, "64.0 MiB"),
        ("shared_memory", spoilt(machine__shm_bytes=65_536_000, packages={}), PASS, "62.5 MiB"),
        ("shared_memory", spoilt(machine__shm_bytes=32 << 20, packages={}), WARN, "32.0 MiB"),
        ("shared_memory", spoilt(machine__shm_bytes=None), WARN, "cannot be read"),
        ("host_memory", WELL, PASS, "4.0 GiB; this machine's memory is 16.0 GiB"),
        ("host_memory", spoilt(machine__memory_bytes=2 << 30), WARN, "2.0 GiB"),
        ("host_memory", spoilt(view=OF_TWO_MODELS), PASS, "devices of 4.0 GiB"),
        ("host_memory", NO_POD, SKIP, ""),
        ("host_memory", elsewhere(machine__memory_bytes=2 << 30), SKIP, "another container"),
        ("shared_memory", elsewhere(machine__shm_bytes=64 << 20), SKIP, "another container"),
        ("termination_log", WELL, PASS, "/dev/termination-log"),
        (
            "termination_log",
            spoilt(machine__termination_log_problem="read-only"),
            WARN,
            "read-only",
        ),
        ("termination_log", spoilt(machine__has_termination_log=False), SKIP, "Kubernetes"),
        ("ports", WELL, PASS, "9400"),
        ("ports", port(STRANGER), FAIL, "port 9411 (probes of engine-1) is in use by pid 99 (jup"),
        ("ports", port(None), FAIL, "not visible here"),
        ("ports", port(None, is_taken=False), PASS, "9411"),
        ("ports", port(Process(31, "python")), PASS, "9411"),
        # A part that is up was given another port, and this one is nobody's business.
        ("ports", port(STRANGER, "engine-0"), PASS, "9411"),
        ("ports", spoilt(view=AWAY), FAIL, "pid 9 has it"),
        ("vllm_version", WELL, PASS, "0.31 to 0.33"),
        ("vllm_version", spoilt(packages={"vllm": "0.30.1"}), FAIL, "0.30.1"),
        ("vllm_version", spoilt(packages={"vllm": "dev"}), FAIL, "dev"),
        ("vllm_version", spoilt(packages={}), SKIP, "not installed"),
        ("driver", WELL, PASS, "580.00, 1 GPU"),
        ("driver", spoilt(gpus=NO_DRIVER), SKIP, "no driver here"),
        ("driver", spoilt(gpus=Gpus(problem="it hangs", is_broken=True)), FAIL, "it hangs"),
        ("driver", spoilt(gpus=Gpus((), "580.00")), WARN, "lists no GPU"),
        ("device_uuid", gpus(), PASS, GPU),
        ("device_uuid", WELL, PASS, "no device is configured or served"),
        ("device_uuid", spoilt(gpus(), served=(f"{GPU}.chat", f"{GPU}.coder")), PASS, GPU),
        (
            "device_uuid",
            spoilt(gpus(), served=(OTHER_GPU,)),
            FAIL,
            f"{OTHER_GPU} is not visible here",
        ),
        (
            "device_uuid",
            spoilt(named={"UNDERSTUDY_GPUS": ["GPU-ff"]}),
            FAIL,
            "UNDERSTUDY_GPUS names",
        ),
        ("device_uuid", spoilt(named={"UNDERSTUDY_GPUS": ["GPU-5A0F"]}), PASS, "GPU-5A0F"),
        ("device_uuid", spoilt(gpus=NO_DRIVER), SKIP, "no GPU is visible"),
        ("persistence_mode", gpus(), PASS, "1 GPU"),
        ("persistence_mode", gpus(is_persistent=None), PASS, "1 GPU"),
        ("persistence_mode", gpus(is_persistent=False), WARN, f"off on {GPU}"),
        ("persistence_mode", spoilt(gpus=NO_DRIVER), SKIP, "no GPU is visible"),
        ("mig_mode", gpus(), PASS, "no GPU is in MIG mode"),
        ("mig_mode", gpus(is_mig=True, instances=("MIG-1", "MIG-2")), PASS, "2 instances"),
        ("mig_mode", gpus(is_mig=True), FAIL, "no instance"),
        ("sharing_mode", gpus(), PASS, "default"),
        ("sharing_mode", gpus(compute_mode="exclusive_process"), FAIL, "exclusive_process"),
        ("sharing_mode", spoilt(gpus(), mps="pid 5 is nvidia-cuda-mps"), WARN, "pid 5"),
        ("memory_outside", WELL, PASS, "no process outside"),
        ("memory_outside", gpus(HeldMemory(GMS, 1 << 30)), PASS, "no process outside"),
        ("memory_outside", gpus(HeldMemory(STRANGER, 1 << 30)), FAIL, "pid 99 (jupyter) (1.0 GiB)"),
        ("memory_outside", gpus(HeldMemory(STRANGER, None)), FAIL, "pid 99 (jupyter)"),
        (
            "memory_outside",
            spoilt(gpus(HeldMemory(STRANGER, 1)), served=("HOST-0",)),
            WARN,
            "pid 99",
        ),
        ("memory_outside", spoilt(slabs=(HeldMemory(STRANGER, 1 << 20),)), FAIL, "1.0 MiB"),
        (
            "memory_outside",
            spoilt(gpus(HeldMemory(STRANGER, 1)), sockets=(SocketFile("a.sock", True, None),)),
            SKIP,
            "PID namespaces",
        ),
        ("memory_outside", spoilt(NO_POD, gpus=NO_DRIVER), SKIP, "no GPU is visible"),
        ("kv_memory", with_kv(None), PASS, "no engine waits"),
        ("kv_memory", with_kv({"reason": "no server is listening"}), WARN, "HOST-0: no server"),
        ("kv_memory", with_kv({"problem": "cannot open"}), WARN, "HOST-0: cannot open"),
        (
            "kv_memory",
            with_kv({"waiting": [{"engine": "engine-1", "message": "mapped by pid 7"}]}),
            WARN,
            "engine-1 waits for the KV memory of HOST-0: mapped by pid 7",
        ),
        ("kv_memory", with_kv(IDLE_KV), PASS, "2.0 GiB of HOST-0 are idle"),
        (
            "kv_memory",
            with_kv(IDLE_KV, sessions=[{"engine": "engine-1", "state": "allocating"}]),
            WARN,
            "2.0 GiB of KV memory of HOST-0 are idle, and an engine waits",
        ),
    ],
)
def test_each_check_names_the_problem_and_its_fix(check, facts, status, words):
    """Goal: one problem, one finding. Method: a table over every branch of every check."""
    finding = ask(check, facts)
    assert (finding.status, words in finding.found) == (status, True), finding
    assert bool(finding.fix) == (status in (FAIL, WARN))


def test_healthy_machine_passes_every_check():
    """Goal: no false alarm. Method: the facts that the table spoils, as they are; and no pod."""
    assert {each.finding.status for each in examine(gpus())} == {PASS}
    assert {each.finding.status for each in examine(NO_POD)} == {PASS, SKIP}


def test_ids_are_stable_and_unique():
    """Goal: programs may rely on them. Method: the list, to the letter."""
    assert [check.id for check in CHECKS] == [
        *("directory", "path_length", "shared", "one_lockserver", "flock", "stale_sockets"),
        *("gateway", "one_gateway", "private_sockets", "engines", "tls_files"),
        *("pool", "pool_file", "pool_sizes", "pool_fit", "pool_waits"),
        *("peer_pidfd", "pidfd_open", "start_method", "descriptors", "clock_source"),
        *("shared_memory", "huge_pages", "host_memory", "termination_log", "ports", "vllm_version"),
        *("driver", "device_uuid", "persistence_mode", "mig_mode", "sharing_mode"),
        *("memory_outside", "kv_memory"),
    ]
    assert len({check.title for check in CHECKS}) == len(CHECKS)


def test_every_check_is_in_the_reference_in_order():
    """docs/reference.md explains every id."""
    page = (Path(__file__).parents[3] / "docs/reference.md").read_text()
    section = page.partition("\n## Doctor")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)`", section, re.MULTILINE) == [check.id for check in CHECKS]


@pytest.mark.parametrize(
    ("facts", "plain", "strict", "status"),
    [
        (gpus(), True, True, "pass"),
        (NO_POD, True, True, "pass"),
        (limits(1024), True, False, "warn"),
        (limits(100), False, False, "fail"),
    ],
)
def test_warnings_fail_only_with_strict(facts, plain, strict, status):
    """Goal: exit codes. Method: the worst finding is each status in turn."""
    results = examine(facts)
    assert is_well(results, is_strict=False) is plain
    assert is_well(results, is_strict=True) is strict
    assert document("/d", results)["status"] == status


def test_document_and_lines_agree_most_serious_first():
    """Goal: people and programs read the same report. Method: a failure, a warning, a fix."""
    facts = spoilt(limits(100), kernel__clock_source="hpet", gpus=NO_DRIVER)
    results = examine(facts)
    found = document("/d", results, ["x was removed"])
    assert json.loads(json.dumps(found)) == found
    assert set(found) == {"schema", "dir", "status", "counts", "fixed", "checks"}
    assert set(found["checks"][0]) == {"id", "title", "status", "found", "fix"}
    counts = found["counts"]
    assert (counts["fail"], counts["warn"], sum(counts.values())) == (1, 1, len(CHECKS))
    text = lines(results, ["x was removed"])
    assert text[0] == "fixed  x was removed"
    assert text[1].startswith("fail  open file descriptors")
    assert text[2].strip().startswith("→ raise `ulimit -Hn`")
    assert text[3].startswith("warn  clock source")
    assert text[-1].startswith("1 failed, 1 warning, ")
    words = [line.split()[0] for line in text[1:-1] if not line.startswith(" ")]
    assert words == sorted(words, key=["fail", "warn", "pass", "skip"].index)
    for check in found["checks"]:
        assert sum(check["found"] in line for line in text) >= 1


def test_parts_of_the_pod_in_the_facts_are_the_pods():
    """The facts that the tables use agree with themselves."""
    assert {LOCKSERVER.pid, GMS.pid, ENGINE.pid} <= WELL.pids
    assert STRANGER.pid not in WELL.pids


def test_flag_of_two_ports_is_named_once():
    """Goal: a readable fix. Method: strangers on both engines' ports, of a pod that is
    down."""
    taken = [
        Port(number, f"probes of {part}", "--engine-port", part, True, STRANGER)
        for number, part in ((9420, "engine-2"), (9421, "engine-3"))
    ]
    fix = ask("ports", spoilt(ports=tuple(taken))).fix
    assert fix == "stop it, or choose another port with --engine-port"

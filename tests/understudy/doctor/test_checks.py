"""Every check as pure code: what it reports, what it names, and which fix it gives."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.documents import mismatches
from tests.understudy.doctor.facts import (
    GMS,
    GPU,
    HERE,
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
    FindingStatus,
    GpuFacts,
    Gpus,
    HeldMemory,
    PodFacts,
    Port,
    Process,
    SocketFile,
    SocketListener,
)
from understudy.schema import DoctorDocument

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
SMALL_PAGES = spoilt(machine__has_huge_slabs=False, machine__shared_huge_pages="never")
TWIN = SocketListener("gateway.sock", Process(60, "gateway"), HERE)
OPENED = SocketFile("engine_engine-0.http.sock", True, 30, 0o666)
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
    ("check", "facts", "status"),
    [
        ("directory", WELL, PASS),
        ("directory", spoilt(directory__kind="missing"), PASS),
        ("directory", spoilt(directory__kind="missing", directory__can_be_made=False), FAIL),
        ("directory", spoilt(directory__kind="a symbolic link"), FAIL),
        ("directory", spoilt(directory__owner_uid=0), FAIL),
        ("directory", spoilt(directory__mode=0o755), FAIL),
        ("path_length", WELL, PASS),
        ("path_length", spoilt(directory__path="/" + 84 * "x"), FAIL),
        ("path_length", spoilt(NO_POD, directory__path="/" + 60 * "x"), FAIL),
        ("shared", WELL, PASS),
        ("shared", listens(ELSEWHERE), FAIL),
        ("shared", listens(REPLACED), FAIL),
        ("shared", listens(UNSEEN), FAIL),
        ("shared", spoilt(NO_POD, listeners=(ELSEWHERE,), directory__identity=None), FAIL),
        ("shared", spoilt(view=DEAF), FAIL),
        ("shared", spoilt(listens(UNSEEN), directory__owner_uid=0), SKIP),
        ("shared", NO_POD, SKIP),
        ("shared", spoilt(NO_POD, directory__kind="missing"), SKIP),
        (
            "shared",
            spoilt(NO_POD, directory__filesystem="overlay", directory__is_mounted=False),
            WARN,
        ),
        ("one_lockserver", WELL, PASS),
        ("one_lockserver", listens(SECOND), FAIL),
        ("one_lockserver", NO_POD, SKIP),
        ("flock", WELL, PASS),
        ("flock", spoilt(directory__flock_problem="No locks available"), FAIL),
        ("flock", spoilt(directory__kind="missing"), SKIP),
        ("flock", spoilt(directory__owner_uid=0), SKIP),
        ("stale_sockets", WELL, PASS),
        ("stale_sockets", spoilt(sockets=(SocketFile("x.sock", False),)), WARN),
        ("gateway", WELL, PASS),
        ("gateway", NO_POD, SKIP),
        ("gateway", spoilt(view=NO_SERVICE), SKIP),
        ("gateway", spoilt(view={**VIEW, "gateway": None}), FAIL),
        ("gateway", spoilt(view={**VIEW, "gateway": {"error": "gone"}}), FAIL),
        ("gateway", spoilt(view=IN_SILENCE), FAIL),
        ("gateway", spoilt(view=CLOSED), FAIL),
        ("one_gateway", WELL, PASS),
        ("one_gateway", NO_POD, SKIP),
        ("one_gateway", listens(TWIN), FAIL),
        ("one_gateway", spoilt(view=TWO_BORROW), WARN),
        ("private_sockets", WELL, PASS),
        ("private_sockets", NO_POD, SKIP),
        ("private_sockets", spoilt(NO_POD, sockets=(OPENED,)), FAIL),
        ("engines", WELL, PASS),
        ("engines", NO_POD, SKIP),
        ("engines", spoilt(view=UNPROVED), WARN),
        ("tls_files", WELL, PASS),
        ("tls_files", spoilt(tls_files={}), SKIP),
        ("tls_files", spoilt(tls_files={"A is /c": "gone"}), FAIL),
        ("peer_pidfd", WELL, PASS),
        ("peer_pidfd", spoilt(machine__has_peer_pidfd=False), WARN),
        ("peer_pidfd", spoilt(machine__has_peer_pidfd=False, view=BLIND), FAIL),
        ("peer_pidfd", spoilt(machine__has_peer_pidfd=False, machine__has_pidfd_open=False), FAIL),
        ("pidfd_open", WELL, PASS),
        ("pidfd_open", spoilt(machine__has_pidfd_open=False), FAIL),
        ("start_method", WELL, PASS),
        ("start_method", spoilt(environ={"VLLM_WORKER_MULTIPROCESSING_METHOD": "fork"}), WARN),
        ("descriptors", WELL, PASS),
        ("descriptors", limits(1023), FAIL),
        ("descriptors", limits(1024), WARN),
        ("descriptors", limits(4096), PASS),
        ("descriptors", limits(4096, 3500), WARN),
        ("huge_pages", WELL, PASS),
        ("huge_pages", spoilt(SMALL_PAGES, view=NO_POD.view), SKIP),
        ("huge_pages", SMALL_PAGES, WARN),
        ("huge_pages", spoilt(SMALL_PAGES, machine__shared_huge_pages=None), WARN),
        ("clock_source", WELL, PASS),
        ("clock_source", spoilt(machine__clock_source="hpet"), WARN),
        ("clock_source", spoilt(machine__clock_source=None), SKIP),
        ("shared_memory", WELL, PASS),
        ("shared_memory", spoilt(machine__shm_bytes=64 << 20), WARN),
        ("shared_memory", spoilt(machine__shm_bytes=65_536_000, packages={}), PASS),
        ("shared_memory", spoilt(machine__shm_bytes=32 << 20, packages={}), WARN),
        ("shared_memory", spoilt(machine__shm_bytes=None), WARN),
        ("host_memory", WELL, PASS),
        ("host_memory", spoilt(machine__memory_bytes=2 << 30), WARN),
        ("host_memory", spoilt(view=OF_TWO_MODELS), PASS),
        ("host_memory", NO_POD, SKIP),
        ("host_memory", elsewhere(machine__memory_bytes=2 << 30), SKIP),
        ("shared_memory", elsewhere(machine__shm_bytes=64 << 20), SKIP),
        ("termination_log", WELL, PASS),
        ("termination_log", spoilt(machine__termination_log_problem="read-only"), WARN),
        ("termination_log", spoilt(machine__termination_log=None), SKIP),
        ("ports", WELL, PASS),
        ("ports", port(STRANGER), FAIL),
        ("ports", port(None), FAIL),
        ("ports", port(None, is_taken=False), PASS),
        ("ports", port(Process(31, "python")), PASS),
        ("ports", port(STRANGER, "engine-0"), PASS),
        ("ports", spoilt(view=AWAY), FAIL),
        ("vllm_version", WELL, PASS),
        ("vllm_version", spoilt(packages={"vllm": "0.30.1"}), FAIL),
        ("vllm_version", spoilt(packages={"vllm": "dev"}), FAIL),
        ("vllm_version", spoilt(packages={}), SKIP),
        ("driver", WELL, PASS),
        ("driver", spoilt(gpus=NO_DRIVER), SKIP),
        ("driver", spoilt(gpus=Gpus(problem="it hangs", is_broken=True)), FAIL),
        ("driver", spoilt(gpus=Gpus((), "580.00")), WARN),
        ("device_uuid", gpus(), PASS),
        ("device_uuid", WELL, PASS),
        ("device_uuid", spoilt(gpus(), served=(f"{GPU}.chat", f"{GPU}.coder")), PASS),
        ("device_uuid", spoilt(gpus(), served=(OTHER_GPU,)), FAIL),
        ("device_uuid", spoilt(named={"UNDERSTUDY_GPUS": ["GPU-ff"]}), FAIL),
        ("device_uuid", spoilt(named={"UNDERSTUDY_GPUS": ["GPU-5A0F"]}), PASS),
        ("device_uuid", spoilt(gpus=NO_DRIVER), SKIP),
        ("persistence_mode", gpus(), PASS),
        ("persistence_mode", gpus(is_persistent=None), PASS),
        ("persistence_mode", gpus(is_persistent=False), WARN),
        ("persistence_mode", spoilt(gpus=NO_DRIVER), SKIP),
        ("mig_mode", gpus(), PASS),
        ("mig_mode", gpus(is_mig=True, instances=("MIG-1", "MIG-2")), PASS),
        ("mig_mode", gpus(is_mig=True), FAIL),
        ("sharing_mode", gpus(), PASS),
        ("sharing_mode", gpus(compute_mode="exclusive_process"), FAIL),
        ("sharing_mode", spoilt(gpus(), mps="pid 5 is nvidia-cuda-mps"), WARN),
        ("memory_outside", WELL, PASS),
        ("memory_outside", gpus(HeldMemory(GMS, 1 << 30)), PASS),
        ("memory_outside", gpus(HeldMemory(STRANGER, 1 << 30)), FAIL),
        ("memory_outside", gpus(HeldMemory(STRANGER, None)), FAIL),
        ("memory_outside", spoilt(gpus(HeldMemory(STRANGER, 1)), served=("HOST-0")), WARN),
        ("memory_outside", spoilt(slabs=(HeldMemory(STRANGER, 1 << 20),)), FAIL),
        (
            "memory_outside",
            spoilt(gpus(HeldMemory(STRANGER, 1)), sockets=(SocketFile("a.sock", True, None),)),
            SKIP,
        ),
        ("memory_outside", spoilt(NO_POD, gpus=NO_DRIVER), SKIP),
        ("kv_memory", with_kv(None), PASS),
        ("kv_memory", with_kv({"reason": "no server is listening"}), WARN),
        ("kv_memory", with_kv({"problem": "cannot open"}), WARN),
        (
            "kv_memory",
            with_kv({"waiting": [{"engine": "engine-1", "message": "mapped by pid 7"}]}),
            WARN,
        ),
        ("kv_memory", with_kv(IDLE_KV), PASS),
        (
            "kv_memory",
            with_kv(IDLE_KV, sessions=[{"engine": "engine-1", "state": "allocating"}]),
            WARN,
        ),
    ],
)
def test_each_check_names_the_problem_and_its_fix(check, facts, status):
    """Goal: one problem, one finding. Method: a table over every branch of every check."""
    finding = ask(check, facts)
    assert finding.status == status, finding
    assert bool(finding.fix) == (status in (FAIL, WARN))


def test_healthy_machine_passes_every_check():
    """Goal: no false alarm. Method: the facts that the table spoils, as they are; and no pod."""
    assert {each.status for each in examine(gpus())} == {PASS}
    assert {each.status for each in examine(NO_POD)} == {PASS, SKIP}


def test_every_check_is_in_the_reference_in_order():
    """Goal: ids are stable, unique and explained. Method: docs/reference.md."""
    page = (Path(__file__).parents[3] / "docs/reference.md").read_text()
    section = page.partition("\n## Doctor")[2].partition("\n## ")[0]
    found = re.findall(r"^- `(\w+)`", section, re.MULTILINE)
    assert found == [judge.__name__ for _, judge in CHECKS]
    assert len({title for title, _ in CHECKS}) == len(set(found)) == len(CHECKS)


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
    facts = spoilt(limits(100), machine__clock_source="hpet", gpus=NO_DRIVER)
    results = examine(facts)
    found, text = document("/d", results), lines(results)
    counts = found["counts"]
    assert (counts["fail"], counts["warn"], sum(counts.values())) == (1, 1, len(CHECKS))
    words = [line.split()[0] for line in text[:-1] if not line.startswith(" ")]
    assert words == sorted(words, key=["fail", "warn", "pass", "skip"].index)
    assert text[1].strip().startswith("→ ")
    for check in found["checks"]:
        assert any(check["found"] in line for line in text)
    assert mismatches(found, DoctorDocument) == []

"""The one allocation that gets our addresses, and what a worker refuses; without an engine.

All addresses are real host memory; only vLLM's own code is replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.backends.kv_range import Backing, KvRange
from engine.backends.process_memory import RESERVE_BYTES, Room
from engine.backends.vllm import membership
from engine.backends.vllm.worker import worker, worker_cpu
from engine.backends.vllm.worker.kv_arena import KVArena
from engine.backends.vllm.worker.worker import StockGPUWorker
from engine.backends.vllm.worker.worker_cpu import CPUWorker, StockCPUWorker
from lockserver import serving
from plumbing.errors import UnderstudyError, UsageError

SIZE = (4 << 20) + 64
CPU = torch.device("cpu")


@pytest.fixture
def room() -> SimpleNamespace:
    """What is free; tests take it away."""
    return SimpleNamespace(free_bytes=1 << 40)


@pytest.fixture
def addresses(room: SimpleNamespace) -> Iterator[KvRange]:
    found = KvRange("HOST-0", SIZE, lambda: Room(room.free_bytes, 1 << 40, "a test"))
    yield found
    found.free()


def allocate(addresses: KvRange) -> torch.Tensor:
    with KVArena(addresses, CPU):
        return torch.zeros(SIZE, dtype=torch.int8, device=torch.device("cpu"))


def test_kv_buffer_lies_at_our_addresses_and_other_tensors_do_not(addresses: KvRange):
    """vLLM's one call, among others like it: only that one is ours, and only inside the context."""
    with KVArena(addresses, CPU):
        others = [torch.zeros(8), torch.zeros(4, 4, dtype=torch.int32), torch.ones(3)]
        buffer = torch.zeros(SIZE, dtype=torch.int8, device=torch.device("cpu"))
    outside = torch.zeros(SIZE, dtype=torch.int8)
    start, end = addresses.address, addresses.address + SIZE
    assert (buffer.data_ptr(), buffer.numel(), buffer.dtype) == (start, SIZE, torch.int8)
    assert all(not start <= each.data_ptr() < end for each in (*others, outside))
    assert addresses.backing is Backing.SCRATCH
    buffer.fill_(3)  # warming up may touch all of it
    assert addresses.resident_bytes() >= SIZE


@pytest.mark.parametrize(
    ("sizes", "seen"),
    [([], "none"), ([SIZE - 1], str(SIZE - 1)), ([SIZE, 8], f"{SIZE} and 8"), ([SIZE] * 2, "and")],
)
def test_any_other_allocation_is_refused_with_both_numbers(
    addresses: KvRange, sizes: list[int], seen: str
):
    """None, another size, one more: a vLLM that we do not know fails at start."""
    arena = KVArena(addresses, CPU)
    with pytest.raises(UsageError, match=r"vllm\.kv_contract") as caught, arena:  # noqa: PT012 - vLLM's side
        for size in sizes:
            torch.zeros(size, dtype=torch.int8)
    assert f"one buffer of {SIZE} bytes was expected" in caught.value.message
    assert seen in caught.value.message


# ---------------------------------------------------------------------- the worker


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[UnderstudyError]:
    """What the supervisor was told."""
    told: list[UnderstudyError] = []
    monkeypatch.setattr(membership, "_member", SimpleNamespace(report=told.append))
    return told


def make_worker(kv_bytes: int | None = SIZE, ranks: int = 2) -> Any:
    """A worker that vLLM has not started."""
    made = CPUWorker.__new__(CPUWorker)
    made.rank, made.device = 1, CPU
    made.cache_config = SimpleNamespace(kv_cache_memory_bytes=kv_bytes)
    made.parallel_config = SimpleNamespace(world_size=ranks)
    made.distributed_init_method = "tcp://127.0.0.1:1"
    return made


def config_of(*sizes: int) -> Any:
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(page_size_bytes=64))
    tensors = [SimpleNamespace(size=size) for size in sizes]
    return SimpleNamespace(num_blocks=4, kv_cache_tensors=tensors, kv_cache_groups=[group])


def test_size_that_can_never_fit_is_refused_before_the_weights(
    reported: list[UnderstudyError], monkeypatch: pytest.MonkeyPatch
):
    """The device is there, the model is not loaded yet: needed (of all ranks) and allowed, and the
    supervisor is told. One that fits passes."""
    monkeypatch.setattr(StockCPUWorker, "init_device", lambda self: None)
    monkeypatch.setattr(
        worker_cpu, "read_room", lambda: Room(0, RESERVE_BYTES + SIZE, "this machine")
    )
    make_worker(ranks=1).init_device()
    sentence = "needs 8.0 MiB and this machine allows 68.0 MiB in total; lower --kv-cache-memory"
    with pytest.raises(UsageError, match=sentence) as caught:
        make_worker(ranks=2).init_device()
    assert reported == [caught.value]
    assert caught.value.code == "engine.kv_too_large"


@pytest.mark.parametrize("sizes", [(), (SIZE, 8)])
def test_cache_of_several_buffers_is_refused(reported: list[UnderstudyError], sizes: Any):
    """One buffer can be parked: none or several are told to the supervisor."""
    with pytest.raises(UsageError, match=f"KV cache of {len(sizes)} buffers"):
        make_worker().initialize_from_config(config_of(*sizes))
    assert len(reported) == 1


def test_waking_without_memory_is_refused_and_repeating_is_harmless(
    addresses: KvRange, monkeypatch: pytest.MonkeyPatch
):
    """vLLM's words: asleep twice, awake before memory was taken (an error), then twice."""
    ours = SimpleNamespace(kept=SimpleNamespace(bring_back=lambda budget_s: None))
    monkeypatch.setattr(worker.weights, "_of_this_process", ours)
    found = make_worker()
    found.sleep()
    found.wake_up()  # neither has anything to do before there is a cache
    found.kv = addresses
    allocate(addresses)
    for _ in range(2):
        found.sleep(2)
        assert addresses.backing is Backing.PARKED
    with pytest.raises(UnderstudyError, match=r"rank 1 is parked.*\[engine\.not_awake\]"):
        found.wake_up()
    for _ in range(2):
        answer = found.understudy_take_kv(0.0)
        assert (answer["problem"], answer["rank"], addresses.backing) == ("", 1, Backing.TAKEN)
        found.wake_up(["kv_cache"])
    found.discard(("weights",))
    assert addresses.backing is Backing.TAKEN
    found.discard(("weights", "kv_cache"))
    assert addresses.backing is Backing.PARKED


def test_methods_that_the_backend_calls_never_raise(
    addresses: KvRange, room: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
):
    """No room: a code and a sentence. A bug: a code and its text. Never an exception, which would
    leave the other ranks' answers for the next question."""
    ours = SimpleNamespace(kept=SimpleNamespace(bring_back=lambda budget_s: None))
    monkeypatch.setattr(worker.weights, "_of_this_process", ours)
    found = make_worker()
    found.kv = addresses
    allocate(addresses)
    room.free_bytes = 0
    answer = found.understudy_take_kv(0.0)
    assert (answer["rank"], answer["code"]) == (1, "engine.kv_memory_busy")
    assert "needs 4.0 MiB and 0 B are free" in answer["problem"]
    answer = found.understudy_distrust("why")  # these weights cannot be distrusted
    assert answer["code"] == "vllm.process_failed"
    assert "AttributeError" in answer["problem"]


def test_rank_that_cannot_park_says_so_later_and_keeps_its_place(
    addresses: KvRange, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Goal: vLLM is never told of a rank that fails to park, and the backend always is. Method: an
    unmap that fails once: no exception from `sleep`, a refusal of every question after it, and the
    serving file is left only by the sleep that succeeds. Nothing is mapped before it is joined."""
    path, file = serving.create(str(tmp_path), f"e-{1:016x}")
    seat = serving.ServingSeat(path, file)
    monkeypatch.setattr(membership, "_member", SimpleNamespace(seat=seat))
    reader = SimpleNamespace(epoch="")
    kept = SimpleNamespace(is_away=False, bring_back=lambda budget_s: None, reader=reader)
    weights = SimpleNamespace(bytes=0, identity={"models": {}}, kept=kept)
    monkeypatch.setattr(worker.weights, "_of_this_process", weights)
    found = make_worker()
    found.kv = addresses
    allocate(addresses)
    assert "before the serving file was joined" in found.understudy_take_kv(0.0)["problem"]
    assert not found.understudy_join(1)["problem"]
    assert not found.understudy_take_kv(0.0)["problem"]
    assert found.understudy_rest(False)["code"] == "vllm.not_parked"
    with monkeypatch.context() as broken:
        broken.setattr(addresses, "park", lambda: 1 / 0)
        found.sleep()
    for answer in (found.understudy_status(), found.understudy_rest(False)):
        assert answer["code"] == "vllm.not_parked"
        assert "ZeroDivisionError" in answer["problem"]
    assert seat.token == 1
    found.sleep()
    assert found.understudy_rest(False)["kv_resident_bytes"] == 0
    assert (seat.token, addresses.backing) == (0, Backing.PARKED)
    seat.close()


def test_a_warm_up_is_not_repeated(addresses: KvRange):
    """It would write to blocks 1, 2 and so on, whoever's they are."""
    found = make_worker()
    found.kv = addresses
    with pytest.raises(UnderstudyError, match=r"engine\.warm_up"):
        found.compile_or_warm_up_model()


# What only reads, says how it is, or has been made to refuse by refusing what it needs first.
HARMLESS = {
    "_check_weight_transfer_engine",
    "_set_draft_weight_update_target",
    "_start_weight_update",
    "_weight_checksum_prefix",
    "compute_weight_checksums",
    "shutdown_weight_transfer_engine",
    "supports_draft_weight_updates",
}


def test_no_method_of_vllms_worker_changes_shared_weights():
    """Every method of vLLM's worker that speaks of weights refuses, or is known not to change any:
    a new one in a later version is found here."""
    names = {name for name in dir(StockGPUWorker) if "weight" in name} - HARMLESS
    assert {"reload_weights", "update_weights", "reset_weights"} <= names
    for name in (*names, "elastic_ep_execute"):
        with pytest.raises(UnderstudyError, match="start engines with the new weights"):
            getattr(make_worker(), name)({}, more=1)

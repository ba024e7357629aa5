"""vLLM's real scheduler over a simulated device: what its KV memory holds, slot by slot.

A slot holds the whole text up to its position, which is what a KV entry depends on. Steps are sent,
written slot by slot, and processed, each when the test says so; and whoever reads the index at any
moment must find true records only.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from engine.backends.vllm.kv.scheduler import KeepingAsyncScheduler, KeepingScheduler
from engine.kv.adopter import adoptable
from engine.kv.layout import IndexHeader, IndexPage, index_bytes
from engine.kv.writer import IndexWriter
from engine.messages import Counts

BLOCKS, BLOCK_TOKENS = 24, 4
VOCABULARY = 3  # few, so that texts have prefixes in common
HASH = get_hash_fn_by_name("sha256")
init_none_hash(HASH)
HASHER = get_request_block_hasher(BLOCK_TOKENS, HASH)
HEADER = IndexHeader(
    pool="0" * 32,
    weights_epoch="1" * 32,
    identity_digest="2" * 64,
    blocks=BLOCKS,
    block_tokens=BLOCK_TOKENS,
    layout_digest="3" * 64,
    dtype="float32",
    attention_backend="CPU_ATTN",
    rank=0,
    ranks=1,
    hash_algorithm="sha256",
    engine_version="vllm",
)

Text = tuple[int, ...]


def config_of(model: Path, *, is_async: bool, by_priority: bool) -> Any:
    config = EngineArgs(
        model=str(model),
        max_model_len=64,
        max_num_seqs=6,
        max_num_batched_tokens=64,
        block_size=16,
        kv_cache_memory_bytes=1 << 20,
        enforce_eager=True,
        scheduling_policy="priority" if by_priority else "fcfs",
    ).create_engine_config()
    config.scheduler_config.async_scheduling = is_async
    config.scheduler_config.max_num_batched_tokens = 10  # prefills come in several steps
    config.scheduler_config.max_num_scheduled_tokens = 10
    config.cache_config.block_size = BLOCK_TOKENS
    config.cache_config.num_gpu_blocks = BLOCKS
    return config


def scheduler_of(config: Any, kinds: tuple[Any, Any]) -> Any:
    """vLLM's scheduler, of the second kind if steps overlap."""
    spec = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=8, dtype=torch.float32
    )
    groups = [KVCacheGroupSpec(["layer"], spec)]
    return kinds[config.scheduler_config.async_scheduling](
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_TOKENS,
        hash_block_size=BLOCK_TOKENS,
    )


class Device:
    """KV memory that outlives schedulers, and its index."""

    def __init__(self) -> None:
        self.slots: dict[int, Text] = {}
        self.truth: dict[bytes, tuple[Text, ...]] = {}
        self.page = IndexPage(memoryview(bytearray(index_bytes(BLOCKS))))

    def learn(self, request: Any) -> None:
        """What the blocks with the hashes of `request` must hold."""
        text = tuple(request.all_token_ids)
        for number, block_hash in enumerate(request.block_hashes):
            ends = range(number * BLOCK_TOKENS + 1, (number + 1) * BLOCK_TOKENS + 1)
            self.truth[bytes(block_hash)] = tuple(text[:end] for end in ends)

    def holds(self, block: int) -> tuple[Text | None, ...]:
        first = block * BLOCK_TOKENS
        return tuple(self.slots.get(first + offset) for offset in range(BLOCK_TOKENS))

    def check(self) -> int:
        """Every record is true, whoever reads it now; how many there are."""
        records = adoptable([self.page], [HEADER], "reader").records
        for record in records:
            assert self.holds(record.block) == self.truth[record.block_hash], record
        return len(records)


class Engine:
    """One scheduler, from its wake to its death."""

    def __init__(self, config: Any, device: Device, rng: random.Random, name: str) -> None:
        self.device, self._rng, self._name = device, rng, name
        self.depth = 2 if config.scheduler_config.async_scheduling else 1
        self.scheduler = scheduler_of(config, (KeepingScheduler, KeepingAsyncScheduler))
        self._requests = self._wakes = 0
        self.counts = Counts()
        self._sent: deque[tuple[Any, Iterator[None], dict[str, list[int]]]] = deque()
        self.wake()

    def wake(self) -> None:
        """Adopt what is published."""
        self._wakes += 1
        pool, device = self.scheduler.kv_cache_manager.block_pool, self.device
        adoption = adoptable([device.page], [HEADER], self._name)
        self.adopted = pool.adopt(adoption.records, BLOCK_TOKENS)
        cohort = f"{self._name}-{self._wakes}"
        writer = IndexWriter([device.page], [HEADER], self._name, cohort, adoption, self.counts)
        pool.kept.open(writer)

    def rest(self) -> None:
        """Hand the memory over, with nothing in progress, as the backend and vLLM do it."""
        self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        while self.in_flight:
            self.process()
        kept = self.scheduler.kv_cache_manager.block_pool.kept
        kept.close()
        assert self.scheduler.reset_prefix_cache(reset_running_requests=True)
        kept.let_go()

    @property
    def in_flight(self) -> int:
        return len(self._sent)

    @property
    def has_requests(self) -> bool:
        return bool(self.scheduler.has_requests())

    def hashed_blocks(self) -> set[int]:
        blocks = self.scheduler.kv_cache_manager.block_pool.blocks
        return {block.block_id for block in blocks if block.block_hash is not None}

    # ------------------------------------------------------------------ what may happen

    def add_any(self) -> None:
        prompt = [self._rng.randrange(VOCABULARY) for _ in range(self._rng.randrange(1, 24))]
        self.add(prompt, self._rng.randrange(1, 20), self._rng.randrange(3))

    def add(self, prompt: list[int], output: int, priority: int) -> str:
        self._requests += 1
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        params.update_from_generation_config({}, None)
        request = Request(
            f"{self._name}-{self._requests}",
            prompt,
            params,
            None,
            arrival_time=self._requests,
            priority=priority,
            block_hasher=HASHER,
        )
        self.device.learn(request)
        self.scheduler.add_request(request)
        return str(request.request_id)

    def abort(self) -> None:
        if self.scheduler.requests:
            victim = self._rng.choice(sorted(self.scheduler.requests))
            self.scheduler.finish_requests([victim], RequestStatus.FINISHED_ABORTED)

    def send(self) -> Any:
        step = self.scheduler.schedule()
        writes: list[tuple[int, Text]] = []
        outputs: dict[str, list[int]] = {}
        for name, count in step.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            end = request.num_computed_tokens
            text = self._text(request, end + 1)
            (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(name)
            for position in range(end - count, end):
                slot = blocks[position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS
                writes.append((slot, text[: position + 1]))
            is_partial = end < request.num_tokens
            outputs[name] = [] if is_partial else [text[end]]
        self._sent.append((step, self._write(writes), outputs))
        return step

    def write_some(self) -> None:
        """The device goes on with the oldest step that it has not finished: it may be torn."""
        for _, writing, _ in self._sent:
            for _ in range(self._rng.randrange(1, 6)):
                if next(writing, self) is self:
                    break
            else:
                return

    def process(self) -> None:
        if not self._sent:
            return
        step, writing, outputs = self._sent.popleft()
        for _ in writing:
            pass
        names = list(outputs)
        made = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[outputs[name] for name in names],
        )
        before = dict(self.scheduler.requests)
        self.scheduler.update_from_output(step, made)
        for request in before.values():
            self.device.learn(request)

    def reset(self) -> None:
        self.scheduler.reset_prefix_cache(reset_running_requests=not self._sent)

    # ------------------------------------------------------------------ the device

    def _text(self, request: Any, length: int) -> Text:
        """The tokens that are known, and those that steps in flight will sample."""
        text = list(request.all_token_ids[:length])
        while len(text) < length:
            text.append(_sampled(tuple(text)))
        return tuple(text)

    def _write(self, writes: list[tuple[int, Text]]) -> Iterator[None]:
        for slot, text in writes:
            self.device.slots[slot] = text
            yield


def _sampled(text: Text) -> int:
    """The model: its next token follows from the text alone."""
    return (sum(text) * 7 + len(text)) % VOCABULARY

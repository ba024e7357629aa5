"""Faults that a resume, a reuse of KV blocks or a wake could have.

Each is planted in the process of the scheduler and the worker, into files of vLLM's that both model
runners use (`OF_BOTH`) or into those of V2. It concerns only steps in which a resumed request is
(`is_resuming`), or what follows a sleep; so answers without interruption are right.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

Plant = Callable[["Site"], None]
FAULTS: dict[str, Plant] = {}
OF_BOTH: list[str] = []
MINUTE_CHANGE = 0.5  # of each number in a KV block
SCHEDULER = "engine.backends.vllm.resume.scheduler"
BLOCK_POOL = "vllm.v1.core.block_pool:BlockPool"
V2, SAMPLE = "vllm.v1.worker.gpu", "vllm.v1.worker.gpu.sample"


class Site:
    """The worker in which a fault is planted, and how to take it out."""

    def __init__(self, worker: Any) -> None:
        self.worker, self.runner = worker, worker.model_runner
        self._undo: list[Callable[[], None]] = []

    def put(self, owner: Any, name: str, new: Callable[..., Any]) -> None:
        """In place of `owner.name`, which may be named, call `new` with it and the arguments."""
        if isinstance(owner, str):
            module, _, attribute = owner.partition(":")
            owner = importlib.import_module(module)
            owner = getattr(owner, attribute) if attribute else owner
        own, old = vars(owner).get(name), getattr(owner, name)  # a static method is wrapped there
        setattr(owner, name, lambda *args, **named: new(old, *args, **named))
        self.undo(lambda: delattr(owner, name) if own is None else setattr(owner, name, own))

    def undo(self, step: Callable[[], None]) -> None:
        self._undo.append(step)

    def heal(self) -> None:
        while self._undo:
            self._undo.pop()()

    def is_resumed(self, slot: int) -> bool:
        """V2: the request in `slot` has an output from before."""
        state = self.runner.req_states
        return bool(state.prefill_len.np[slot] > state.prompt_len.np[slot])

    @property
    def is_resuming(self) -> bool:
        """A resumed request is in the batch."""
        if self.worker.use_v2_model_runner:
            return any(map(self.is_resumed, self.runner.req_states.index_to_req_id))
        from engine.backends.vllm.resume.answer import made_by

        requests, batch = self.runner.requests, self.runner.input_batch
        return any(made_by(requests[each].sampling_params) for each in batch.req_id_to_index)

    def by_slot(self, owner: str, change: Callable[[Any, int, Any], None]) -> None:
        """V2: `change(state, slot, parameters)` behind `add_request` of a resumed request."""

        def add_request(old: Any, state: Any, slot: int, params: Any) -> Any:
            answer = old(state, slot, params)
            if self.is_resumed(slot):
                change(state, slot, params)
            return answer

        self.put(owner, "add_request", add_request)


def fault(plant: Plant) -> Plant:
    FAULTS[plant.__name__.replace("_", " ")] = plant
    return plant


def fault_of_both(plant: Plant) -> Plant:
    OF_BOTH.append(plant.__name__.replace("_", " "))
    return fault(plant)


# ---------------------------------------------------------------------- what was made


@fault
def one_token_of_the_answer_is_dropped(site: Site) -> None:
    site.put(SCHEDULER, "made_by", lambda old, params: old(params)[:-1])


@fault
def the_worker_does_not_know_where_the_prompt_ends(site: Site) -> None:
    def add_request(old: Any, self: Any, **named: Any) -> Any:
        return old(self, **{**named, "prompt_len": len(named["all_token_ids"])})

    site.put(f"{V2}.states:RequestState", "add_request", add_request)


@fault_of_both
def the_grammar_begins_again(site: Site) -> None:
    ours, name = importlib.import_module(SCHEDULER)._Resuming, "_handle_blocked_waiting_request"
    site.put(ours, name, lambda old, self, request: getattr(super(ours, self), name)(request))


# ---------------------------------------------------------------------- sampling


@fault
def the_seed_is_not_carried(site: Site) -> None:
    def change(state: Any, slot: int, params: Any) -> None:
        state.seeds.np[slot] += 1

    site.by_slot(f"{SAMPLE}.states:SamplingStates", change)


@fault
def penalties_count_the_prompt_alone(site: Site) -> None:
    def bincount(old: Any, rows: Any, tokens: Any, prompt: Any, prefill: Any, *more: Any) -> Any:
        return old(rows, tokens, prompt, prompt, *more)

    site.put(f"{SAMPLE}.penalties", "bincount", bincount)


@fault
def minimum_lengths_count_from_the_cut(site: Site) -> None:
    def change(state: Any, slot: int, params: Any) -> None:
        state.min_lens.np[slot] = site.runner.req_states.prefill_len.np[slot] + params.min_tokens

    site.by_slot(f"{SAMPLE}.logit_bias:LogitBiasState", change)


@fault
def bad_words_see_no_output(site: Site) -> None:
    def apply(old: Any, self: Any, logits: Any, context: Any) -> Any:
        return logits if site.is_resuming else old(self, logits, context)

    site.put(f"{SAMPLE}.bad_words:BadWordsState", "apply", apply)


@fault
def the_bias_is_lost(site: Site) -> None:
    def change(state: Any, slot: int, params: Any) -> None:
        state.num_logit_bias.np[slot] = 0

    site.by_slot(f"{SAMPLE}.logit_bias:LogitBiasState", change)


@fault
def the_penalties_of_the_last_owner_of_a_slot_survive(site: Site) -> None:
    names = ("repetition_penalty", "frequency_penalty", "presence_penalty")

    def add_request(old: Any, state: Any, slot: int, params: Any) -> Any:
        before = {name: getattr(state, name).np[slot].copy() for name in names}
        answer = old(state, slot, params)
        if state.use_penalty[slot] or before["repetition_penalty"] == 1.0:
            return answer
        for name, value in before.items():
            getattr(state, name).np[slot] = value
        state.use_penalty[slot] = True
        return True

    site.put(f"{SAMPLE}.penalties:PenaltiesState", "add_request", add_request)


# ---------------------------------------------------------------------- memory


@fault_of_both
def positions_are_off_by_one(site: Site) -> None:
    def forward(old: Any, *asked: Any, **named: Any) -> Any:
        if site.is_resuming and "positions" in named:
            named["positions"] = named["positions"] + 1
        return old(*asked, **named)

    site.put(site.runner.model, "forward", forward)


@fault
def the_block_table_is_off_by_one(site: Site) -> None:
    def append(old: Any, self: Any, slot: int, blocks: Any, overwrite: bool) -> None:
        if overwrite and site.is_resumed(slot):
            blocks = tuple([*group[1:], *group[:1]] for group in blocks)
        old(self, slot, blocks, overwrite)

    site.put(f"{V2}.block_table:BlockTables", "append_block_ids", append)


@fault_of_both
def a_block_that_is_reused_was_altered(site: Site) -> None:
    layers = [*site.runner.kv_caches[:1]]  # one of them, once

    def forward(old: Any, *asked: Any, **named: Any) -> Any:
        if site.is_resuming and layers:
            layers.pop().add_(MINUTE_CHANGE)
        return old(*asked, **named)

    site.put(site.runner.model, "forward", forward)


@fault_of_both
def another_prompts_block_is_reused(site: Site) -> None:
    def get_cached_block(old: Any, self: Any, block_hash: Any, groups: Any) -> Any:
        cached = [each for each in self.blocks if each.block_hash is not None]
        found = old(self, block_hash, groups)
        return found and [cached[(cached.index(each) + 1) % len(cached)] for each in found]

    site.put(BLOCK_POOL, "get_cached_block", get_cached_block)


@fault_of_both
def weights_are_zero_after_a_wake(site: Site) -> None:
    wakes: list[bool] = []

    def wake_up(old: Any, *asked: Any, **named: Any) -> Any:
        wakes.append(True)
        if len(wakes) == 2:
            weight = max(site.runner.model.parameters(), key=lambda each: each.numel()).data
            saved = weight.clone()
            weight.zero_()
            site.undo(lambda: weight.copy_(saved))
        return old(*asked, **named)

    site.put(site.worker, "wake_up", wake_up)


@fault_of_both
def the_cache_is_believed_after_a_sleep(site: Site) -> None:
    site.put(BLOCK_POOL, "reset_prefix_cache", lambda old, self: True)


@fault_of_both
def memory_is_not_the_same_at_two_layers(site: Site) -> None:
    """What two layers wrote lies at the same place, as in scratch memory that is too small."""
    caches = site.runner.kv_caches

    def forward(old: Any, *asked: Any, **named: Any) -> Any:
        answer = old(*asked, **named)
        caches[-1].copy_(caches[0])
        return answer

    site.put(site.runner.model, "forward", forward)

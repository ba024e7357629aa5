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


class Site:
    """The worker in which a fault is planted, and how to take it out."""

    def __init__(self, worker: Any) -> None:
        self.worker, self.runner = worker, worker.model_runner
        self.is_v2 = bool(worker.use_v2_model_runner)
        self._undo: list[Callable[[], None]] = []

    def put(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace `owner.name` by what `make` makes of it; `owner` may be named."""
        if isinstance(owner, str):
            module, _, attribute = owner.partition(":")
            owner = importlib.import_module(module)
            owner = getattr(owner, attribute) if attribute else owner
        own, old = vars(owner).get(name), getattr(owner, name)  # a static method is wrapped there
        setattr(owner, name, make(old))
        self.undo(lambda: delattr(owner, name) if own is None else setattr(owner, name, own))

    def undo(self, step: Callable[[], None]) -> None:
        self._undo.append(step)

    def heal(self) -> None:
        while self._undo:
            self._undo.pop()()

    @property
    def is_resuming(self) -> bool:
        """A resumed request is in the batch."""
        if self.is_v2:
            state = self.runner.req_states
            return any(
                state.prefill_len.np[index] > state.prompt_len.np[index]
                for index in state.index_to_req_id
            )
        from engine.backends.vllm.resume.answer import made_by

        requests, batch = self.runner.requests, self.runner.input_batch
        return any(made_by(requests[each].sampling_params) for each in batch.req_id_to_index)


def fault(plant: Plant) -> Plant:
    FAULTS[plant.__name__.replace("_", " ")] = plant
    return plant


def fault_of_both(plant: Plant) -> Plant:
    OF_BOTH.append(plant.__name__.replace("_", " "))
    return fault(plant)


def _by_slot(site: Site, owner: str, change: Callable[[Any, int, Any], None]) -> None:
    """V2: `change(state, slot, parameters)` behind `add_request` of a resumed request."""
    states = site.runner.req_states

    def made(old: Any) -> Any:
        def add_request(self: Any, slot: int, params: Any) -> Any:
            answer = old(self, slot, params)
            if states.prefill_len.np[slot] > states.prompt_len.np[slot]:
                change(self, slot, params)
            return answer

        return add_request

    site.put(owner, "add_request", made)


# ---------------------------------------------------------------------- what was made


@fault
def one_token_of_the_answer_is_dropped(site: Site) -> None:
    name = "engine.backends.vllm.resume.scheduler"
    site.put(name, "made_by", lambda old: lambda params: old(params)[:-1])


@fault
def the_worker_does_not_know_where_the_prompt_ends(site: Site) -> None:
    def made(old: Any) -> Any:
        def add_request(self: Any, **named: Any) -> Any:
            return old(self, **{**named, "prompt_len": len(named["all_token_ids"])})

        return add_request

    site.put("vllm.v1.worker.gpu.states:RequestState", "add_request", made)


@fault_of_both
def the_grammar_begins_again(site: Site) -> None:
    site.put(
        "engine.backends.vllm.resume.scheduler:_Resuming",
        "_handle_blocked_waiting_request",
        lambda old: (
            lambda self, request: super(
                importlib.import_module("engine.backends.vllm.resume.scheduler")._Resuming, self
            )._handle_blocked_waiting_request(request)
        ),
    )


# ---------------------------------------------------------------------- sampling


@fault
def the_seed_is_not_carried(site: Site) -> None:
    def change(self: Any, slot: int, params: Any) -> None:
        self.seeds.np[slot] += 1

    _by_slot(site, "vllm.v1.worker.gpu.sample.states:SamplingStates", change)


@fault
def penalties_count_the_prompt_alone(site: Site) -> None:
    def made(old: Any) -> Any:
        return lambda rows, tokens, prompt, prefill, *more: old(rows, tokens, prompt, prompt, *more)

    site.put("vllm.v1.worker.gpu.sample.penalties", "bincount", made)


@fault
def minimum_lengths_count_from_the_cut(site: Site) -> None:
    states = site.runner.req_states

    def change(self: Any, slot: int, params: Any) -> None:
        self.min_lens.np[slot] = states.prefill_len.np[slot] + params.min_tokens

    _by_slot(site, "vllm.v1.worker.gpu.sample.logit_bias:LogitBiasState", change)


@fault
def bad_words_see_no_output(site: Site) -> None:
    def made(old: Any) -> Any:
        def apply(self: Any, logits: Any, context: Any) -> Any:
            return logits if site.is_resuming else old(self, logits, context)

        return apply

    site.put("vllm.v1.worker.gpu.sample.bad_words:BadWordsState", "apply", made)


@fault
def the_bias_is_lost(site: Site) -> None:
    def change(self: Any, slot: int, params: Any) -> None:
        self.num_logit_bias.np[slot] = 0

    _by_slot(site, "vllm.v1.worker.gpu.sample.logit_bias:LogitBiasState", change)


@fault
def the_penalties_of_the_last_owner_of_a_slot_survive(site: Site) -> None:
    def made(old: Any) -> Any:
        def add_request(self: Any, slot: int, params: Any) -> Any:
            before = {name: getattr(self, name).np[slot].copy() for name in PENALTIES}
            answer = old(self, slot, params)
            if self.use_penalty[slot] or before["repetition_penalty"] == 1.0:
                return answer
            for name, value in before.items():
                getattr(self, name).np[slot] = value
            self.use_penalty[slot] = True
            return True

        return add_request

    site.put("vllm.v1.worker.gpu.sample.penalties:PenaltiesState", "add_request", made)


PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")


# ---------------------------------------------------------------------- memory


@fault_of_both
def positions_are_off_by_one(site: Site) -> None:
    def made(old: Any) -> Any:
        def forward(*asked: Any, **named: Any) -> Any:
            if site.is_resuming and "positions" in named:
                named["positions"] = named["positions"] + 1
            return old(*asked, **named)

        return forward

    site.put(site.runner.model, "forward", made)


@fault
def the_block_table_is_off_by_one(site: Site) -> None:
    def made(old: Any) -> Any:
        def append(self: Any, slot: int, blocks: Any, overwrite: bool) -> None:
            state = site.runner.req_states
            if overwrite and state.prefill_len.np[slot] > state.prompt_len.np[slot]:
                blocks = tuple([*group[1:], *group[:1]] for group in blocks)
            old(self, slot, blocks, overwrite)

        return append

    site.put("vllm.v1.worker.gpu.block_table:BlockTables", "append_block_ids", made)


@fault_of_both
def a_block_that_is_reused_was_altered(site: Site) -> None:
    is_done: list[bool] = []

    def made(old: Any) -> Any:
        def forward(*asked: Any, **named: Any) -> Any:
            if site.is_resuming and not is_done:
                is_done.append(True)
                for cache in site.runner.kv_caches[:1]:  # one layer
                    cache.add_(MINUTE_CHANGE)
            return old(*asked, **named)

        return forward

    site.put(site.runner.model, "forward", made)


@fault_of_both
def another_prompts_block_is_reused(site: Site) -> None:
    def made(old: Any) -> Any:
        def get_cached_block(self: Any, block_hash: Any, groups: Any) -> Any:
            found = old(self, block_hash, groups)
            if found is None:
                return None
            cached = [each for each in self.blocks if each.block_hash is not None]
            return [cached[(cached.index(each) + 1) % len(cached)] for each in found]

        return get_cached_block

    site.put("vllm.v1.core.block_pool:BlockPool", "get_cached_block", made)


@fault_of_both
def weights_are_zero_after_a_wake(site: Site) -> None:
    wakes: list[bool] = []

    def made(old: Any) -> Any:
        def wake_up(*asked: Any, **named: Any) -> Any:
            wakes.append(True)
            if len(wakes) == 2:
                weight = max(site.runner.model.parameters(), key=lambda each: each.numel()).data
                saved = weight.clone()
                weight.zero_()
                site.undo(lambda: weight.copy_(saved))
            return old(*asked, **named)

        return wake_up

    site.put(site.worker, "wake_up", made)


@fault_of_both
def the_cache_is_believed_after_a_sleep(site: Site) -> None:
    name = "vllm.v1.core.block_pool:BlockPool"
    site.put(name, "reset_prefix_cache", lambda old: lambda self: True)


@fault_of_both
def memory_is_not_the_same_at_two_layers(site: Site) -> None:
    """What two layers wrote lies at the same place, as in scratch memory that is too small."""
    caches = site.runner.kv_caches

    def made(old: Any) -> Any:
        def forward(*asked: Any, **named: Any) -> Any:
            answer = old(*asked, **named)
            caches[-1].copy_(caches[0])
            return answer

        return forward

    site.put(site.runner.model, "forward", made)

"""Which kill comes next, and what clients ask for. Pure.

Every part is to die in every phase of a model's states. The first round pairs each target with
another phase, so that a short drill has both in variety; each further round shifts the pairs by
one, until all were made.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pool.core.states import ModelState
from understudy.drill.pool.records import (
    GMS_COPY,
    GMS_KEEPER,
    GMS_KV,
    PHASES_OF_MODEL,
    POOL,
    POOL_PARTS,
    SHADOW,
    process_of,
)
from understudy.drill.prompts import bank_of
from understudy.drill.records import (
    GATEWAY,
    GATEWAY_CHILD,
    GMS,
    GMS_SUPERVISOR,
    LOCKSERVER,
    STOP,
    SUPERVISOR,
    Prompt,
    base_targets,
)

LONG_STREAM_TOKENS = 160  # longer than a turn with streams beside it: it is parked, and resumes
# In the body of a stream that outlasts its model's turn.
LONG_KINDS: Mapping[str, Mapping[str, Any]] = {
    "stream": {},
    "stream-seed": {"temperature": 1.0, "top_p": 0.9, "seed": 13},
    "stream-penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.4},
    "stream-usage": {"stream_options": {"include_usage": True}},
}


def default_targets(backend: str | None, *, has_shadow: bool, has_copies: bool) -> tuple[str, ...]:
    """Every part and every process, so that those of one kind are not neighbours."""
    front, model, supervisor = _processes(backend)
    shadows = (f"{SHADOW}{model}", f"{SHADOW}{supervisor}") if has_shadow else ("", "")
    # Without a shadow nobody would take over for half a minute, which is how long a hang may last.
    hangs = (f"{STOP}{model}", f"{STOP}{SUPERVISOR}") if has_shadow else ("", "")
    found = (
        POOL,
        model,
        GATEWAY_CHILD,
        supervisor,
        LOCKSERVER,
        shadows[0],
        GMS,
        front,
        GMS_KV,
        hangs[0],
        GATEWAY,
        GMS_COPY if has_copies else "",
        shadows[1],
        GMS_SUPERVISOR,
        hangs[1],
        GMS_KEEPER if has_copies else "",
    )
    return tuple(each for each in found if each)


def _processes(backend: str | None) -> tuple[str, str, str]:
    """The one with the API, the one with the model, and the supervisor."""
    names = base_targets(backend)
    return names[0], names[1], names[-1]


def kill_order(
    targets: Sequence[str], phases: Sequence[ModelState] = PHASES_OF_MODEL
) -> Iterator[tuple[str, ModelState]]:
    """Pairs of a target and a phase, without end; no pair comes twice before all have come. A model
    that is cold has nothing but supervisors."""
    for shift in itertools.count():
        for number, target in enumerate(targets):
            phase = phases[(number + shift) % len(phases)]
            is_backend = target not in POOL_PARTS and process_of(target) != SUPERVISOR
            if not (is_backend and phase is ModelState.COLD):
                yield target, phase


def pool_prompts(backend: str | None, model: str) -> list[Prompt]:
    """Short and long streams, whole answers, and the state that must survive a pause; their keys
    name the model."""
    mixed = bank_of(backend, model, is_long=False)
    common = {**mixed[0].body, "max_tokens": LONG_STREAM_TOKENS, "ignore_eos": True}
    kinds = LONG_KINDS if backend != "vllm" else {"stream": {}}  # as in `bank_of`
    long = [Prompt(name, mixed[0].path, {**common, **more}) for name, more in kinds.items()]
    whole = Prompt("whole-stream", mixed[0].path, {**common, "stream": False})
    return [
        Prompt(f"{model}/{each.key}", each.path, each.body)
        for each in _spread([*long, whole], mixed)
    ]


def _spread(few: Sequence[Prompt], many: Sequence[Prompt]) -> list[Prompt]:
    """One of the few after every third of the many."""
    rest, mixed = list(few), []
    for number, each in enumerate(many):
        if number % 3 == 0 and rest:
            mixed.append(rest.pop(0))
        mixed.append(each)
    return [*mixed, *rest]

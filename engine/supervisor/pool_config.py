"""What the pool file says of one engine: its model, its backend, its devices.

With a pool file every engine of a pod has the same command line, but for its id. The supervisor
reads the file when it starts; a change takes effect when the engine is started again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from engine.backends.registry import model_arguments
from plumbing.errors import UsageError
from plumbing.pod.gms_files import HOST_DEVICES_ENV
from plumbing.pod.messages import Tier
from plumbing.service.config import Resolved

HOST_PREFIX = "HOST-"
CUDA_DEVICES_ENV = "CUDA_VISIBLE_DEVICES"
ORIGIN = "pool file"


class PoolPlace(NamedTuple):
    """`number`: of the engine among all of the pool, in the file's order. `is_alone`: its model has
    no shadow."""

    model: str
    backend: str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    number: int
    is_alone: bool


def place_in_pool(path: str, engine: str, directory: str) -> PoolPlace:
    """What the pool file at `path` says of `engine`.

    Raises:
        UsageError: what is wrong with the file; `engine.not_in_pool`.
    """
    from pool.pool_file import read_pool_file, with_served_names  # YAML: only a pool needs it
    from pool.settings import engines_of

    file = with_served_names(read_pool_file(path), directory)
    ids = [(each, name) for name, model in file.models.items() for each in engines_of(name, model)]
    name = dict(ids).get(engine)
    if name is None:
        raise UsageError(
            "engine.not_in_pool",
            f"{path} has no engine {engine}, but {', '.join(each for each, _ in ids)}: set"
            " --engine-id to one of these, or add a model or its shadow to the file",
        )
    model = file.models[name]
    devices = ",".join(model.devices)
    variable = HOST_DEVICES_ENV if devices.startswith(HOST_PREFIX) else CUDA_DEVICES_ENV
    return PoolPlace(
        model=name,
        backend=model.backend,
        arguments=(
            *model_arguments(model.backend, model.model, model.tensor_parallel),
            *("--served-model-name", name, *model.aliases),
            *map(str, model.args),
        ),
        environment={variable: devices},
        number=ids.index((engine, name)),
        is_alone=len(engines_of(name, model)) == 1,
    )


def placed(config: Resolved, place: PoolPlace, port_first: int) -> Resolved:
    """The settings of an engine that the pool file describes. It begins cold: the pool says when it
    starts.

    Raises:
        UsageError: `engine.pool_decides`.
    """
    told: dict[str, Any] = {
        "backend": place.backend,
        "model_name": place.model,
        "goal": Tier.COLD.value,
    }
    given = [f"--{each.replace('_', '-')}" for each in told if config.origin(each) == "flag"]
    if given:
        raise UsageError(
            "engine.pool_decides",
            f"{', '.join(given)}: with --pool the pool file says it; leave it out, or --pool",
        )
    if config["http_port"] is None:
        told["http_port"] = port_first + place.number
    if place.is_alone and config.origin("yield_ms") == "default":
        told["yield_ms"] = 1  # nobody takes over, so it is relaunched at once
    return config.changed(told, ORIGIN)

"""What a gateway needs of the pool file: its models, in order, and how long requests queue."""

from __future__ import annotations

from typing import NamedTuple

from gateway.core.events import MAX_IN_FLIGHT, LaneRules


class LaneSettings(NamedTuple):
    """By the name of each model."""

    lanes: dict[str, LaneRules]
    aliases: dict[str, tuple[str, ...]]
    queue_max: int


def read_lanes(path: str) -> LaneSettings:
    """
    Raises:
        UsageError: the file cannot be read, or a setting in it is wrong.
    """
    from pool.pool_file import read_pool_file  # YAML, which only a pod with a pool needs

    pool = read_pool_file(path)
    lanes = {
        name: LaneRules(
            max_in_flight=model.max_in_flight or MAX_IN_FLIGHT,
            queue_max=pool.queue.per_model,
            wait_ms=pool.queue.wait * 1000,
            starve_after_ms=pool.starve_after * 1000,
            keep_alive_ms=model.keep_alive * 1000,
            priority=model.priority,
            client_priority=model.client_priority,
        )
        for name, model in pool.models.items()
    }
    aliases = {name: tuple(model.aliases) for name, model in pool.models.items()}
    return LaneSettings(lanes, aliases, pool.queue.max)

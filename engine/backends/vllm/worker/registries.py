"""What vLLM registers per process while it builds a model, set aside and put back.

A writer builds each model twice: once to load it, once to run it. vLLM allows every layer to
register once (`static_forward_context` refuses a second of the same name), and hands rotary
embeddings from one model to the next.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from vllm.model_executor.layers import rotary_embedding


class Registered(NamedTuple):
    """What there is at one time."""

    layers: dict[str, Any]
    expert_layers: list[str]
    rotary: dict[Any, Any]


class Registries:
    """vLLM's registries of layers, for one engine's configuration."""

    def __init__(self, vllm_config: Any) -> None:
        compilation = vllm_config.compilation_config
        self._live = Registered(
            compilation.static_forward_context,
            compilation.static_all_moe_layers,
            rotary_embedding._ROPE_DICT,
        )

    def now(self) -> Registered:
        """A copy of what is registered."""
        return Registered(
            dict(self._live.layers), list(self._live.expert_layers), dict(self._live.rotary)
        )

    def put(self, registered: Registered) -> None:
        """Let exactly `registered` be there; others hold the objects, so they stay the same."""
        self._live.expert_layers[:] = registered.expert_layers
        for live, wanted in (
            (self._live.layers, registered.layers),
            (self._live.rotary, registered.rotary),
        ):
            live.clear()
            live.update(wanted)

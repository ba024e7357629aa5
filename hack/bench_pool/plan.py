"""What is measured, and how often.

Owns the sizes. The device has room for every model at rest and for the KV memory of `awake` of
them, so a switch is one from `warm`; a model that serves nobody is a victim at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

SCENARIOS = ("S1", "S2", "S3", "S4", "S5", "S6", "S7")
PARTS = ("parts",)  # what the pool itself costs, which is no scenario

# As short as the drain and the protection of S5 are to be.
THROUGH_STREAMS: dict[str, Any] = {
    "min_runtime": "500ms",
    "max_wait": "200ms",
    "drain_timeout": {"park": "200ms", "cut": "60s"},
}
HURRIED: dict[str, Any] = {
    "min_runtime": "1s",
    "max_wait": "500ms",
    "drain_timeout": {"park": "200ms", "cut": "30s"},
}


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """Streams that are long because each token takes `token_ms`, as those of a large model do."""

    token_ms: int = 200
    tokens: int = 300
    clients: int = 2  # of each model

    @property
    def arguments(self) -> tuple[str, ...]:
        """What an engine of the reference backend is told."""
        return ("--token-interval-ms", str(self.token_ms))


@dataclass(frozen=True, slots=True)
class Plan:
    """`fair`: the settings of S3, S4 and S6, the product's defaults if empty."""

    backend: str = "reference"
    models: int = 10  # of S2
    # Before each request of S1 and S2: whoever was asked a moment ago is not idle for as long as a
    # switch takes, and does not yield.
    pause_s: float = 0.3
    s1_switches: int = 300
    s2_rounds: int = 20
    offloads: int = 50
    s3_rounds: int = 5
    starved_s: float = 120.0
    s4_models: int = 8
    s4_clients: int = 6
    s4_s: float = 120.0
    s5_switches: int = 1000
    contend_s: float = 60.0  # of S5, by a program that does not say when it switches
    s6_leavers: int = 200
    pool_kills: int = 100
    failovers: int = 10
    requests: int = 300  # through a gateway with a pool and through one without
    idle_s: float = 30.0
    streams: StreamPlan = field(default_factory=StreamPlan)
    fair: dict[str, Any] = field(default_factory=dict)
    s7_phases: tuple[str, ...] = ("draining", "releasing", "waking", "awake", "loading")
    s7_only: tuple[str, ...] = ()  # processes; all, if empty
    s7_streams: StreamPlan = field(default_factory=lambda: StreamPlan(token_ms=10))
    # Clients that stream without pause: four times as many as an engine has slots, so that requests
    # wait in it also while this process is slow to read what has ended.
    saturating: int = 16
    stock_switches: int = 4  # of stock vLLM; each takes half a minute on two cores


QUICK = Plan(
    models=4,
    s1_switches=20,
    s2_rounds=2,
    offloads=3,
    s3_rounds=1,
    starved_s=30.0,
    s4_models=4,
    s4_clients=3,
    s4_s=6.0,
    s5_switches=15,
    contend_s=10.0,
    pool_kills=2,
    failovers=2,
    requests=30,
    idle_s=2.0,
    stock_switches=2,
    streams=StreamPlan(token_ms=50, tokens=60),
    fair=HURRIED,
    s7_phases=("draining",),
    s7_only=("pool", "lockserver", "gms-server", "m0-0"),
)


# An engine of vLLM takes a gigabyte and, on two cores, half a minute to start. Its streams are as
# long as its context.
VLLM = Plan(
    pause_s=1.0,
    models=4,
    s4_models=4,
    pool_kills=20,
    streams=StreamPlan(tokens=900),
    s7_phases=("draining", "waking"),
)


def plan_of(backend: str, *, is_quick: bool) -> Plan:
    full = VLLM if backend == "vllm" else Plan()
    return replace(QUICK if is_quick else full, backend=backend)

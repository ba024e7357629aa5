"""What of the KV cache outlived the engines that were killed. Pure, but for one question.

An engine says how many blocks the next one would find; it is asked right before the kill. What it
published between its last answer and its death counts, too, as far as it was adopted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from understudy.drill.records import EngineKill
from understudy.status.gather import engine_parts, status_of

# Flags of both backends: the KV cache in memory that outlives its engine, and not using that.
LENT_KV, NO_ADOPTION = ("--kv-memory", "gms"), ("--no-kv-adoption",)

# Of the report of a drill without adoption, in the document of the one that it is compared with.
COMPARED = ("passed", "requests", "kills", "resumed", "failover_ms", "pause_ms")


@dataclass(frozen=True, slots=True)
class KvShare:
    """Blocks over all kills. `why`: of the last kill after which fewer were adopted."""

    adopted_blocks: int = 0
    published_blocks: int = 0
    why: str = ""

    @property
    def adopted_share(self) -> float | None:
        """None where no engine had published anything."""
        if not self.published_blocks:
            return None
        return round(self.adopted_blocks / self.published_blocks, 4)

    def to_dict(self) -> dict[str, Any]:
        return {
            "adopted_blocks": self.adopted_blocks,
            "published_blocks": self.published_blocks,
            "adopted_share": self.adopted_share,
        }

    def describe(self) -> str:
        """`312 of 312 adopted (100 %)`, or why not."""
        share = self.adopted_share
        if share is None:
            return "none published"
        why = f": {self.why}" if self.why else ""
        return f"{self.adopted_blocks} of {self.published_blocks} adopted ({share:.1%}){why}"


def kv_of(status: Mapping[str, Any]) -> Mapping[str, Any]:
    """What an engine's status document says of its KV cache."""
    return (status.get("backend") or {}).get("kv") or {}


async def note_adoption(directory: Path, kill: EngineKill) -> None:
    """Ask the engine that took over with what its cache began."""
    for part in engine_parts(directory):
        if part.name == kill.new_engine:
            status = await status_of(part)
            kv = kv_of(status)
            if kv and (status.get("lock") or {}).get("token") == kill.new_token:
                kill.adopted_blocks = int(kv.get("adopted_blocks") or 0)
                kill.kv_note = str(kv.get("note") or "")


def kv_share(kills: Iterable[EngineKill]) -> KvShare:
    """Over the kills whose successor said what it adopted."""
    adopted = published = 0
    why = ""
    for kill in kills:
        if kill.adopted_blocks is not None:
            adopted += kill.adopted_blocks
            published += max(kill.kept_blocks, kill.adopted_blocks)
            if kill.adopted_blocks < kill.kept_blocks:
                why = kill.kv_note
    return KvShare(adopted, published, why)

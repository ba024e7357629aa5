"""What the backend asks of a worker, for one without a memory service that is never parked."""

from __future__ import annotations

from typing import Any


class Standing:
    rank: int
    problem = ""  # what is in the way of resuming

    def understudy_status(self) -> dict[str, Any]:
        return self._answer(
            weights_bytes=0,
            kv_bytes=0,
            epoch="",
            identity={"models": {}},
            cannot_resume=self.problem,
            cannot_offload="it has no memory service",
        )

    def understudy_into_huge_pages(self) -> dict[str, Any]:
        return self._answer(huge_bytes=0)

    def understudy_join(self, token: int) -> dict[str, Any]:
        return self._answer()

    def understudy_take_kv(self, deadline_s: float) -> dict[str, Any]:
        return self._answer(kv_bytes=0)

    def _answer(self, **more: Any) -> dict[str, Any]:
        return {"rank": self.rank, "ok": True, "code": "", "error": "", **more}

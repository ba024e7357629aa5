"""Runs a program of `hack` in a directory of its own, whose logs are kept unless all was well."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from plumbing.service.cli import INTERRUPTED, run_async


def run_below(
    prefix: str, run: Callable[[Path], Awaitable[dict[str, Any] | None]]
) -> dict[str, Any]:
    """What `run` has found below a new directory, which is removed if that has `passed`. The
    process ends if `run` is interrupted, which it says with None, or fails."""
    base = Path(tempfile.mkdtemp(prefix=prefix))
    found: dict[str, Any] | None = None

    async def body() -> dict[str, Any] | None:
        return await run(base)

    try:
        found = run_async(body)
    finally:
        if found is not None and found["passed"]:
            shutil.rmtree(base, ignore_errors=True)
        else:
            print(f"the logs of all parts are kept in {base}", file=sys.stderr, flush=True)
    if found is None:
        sys.exit(INTERRUPTED)
    return found

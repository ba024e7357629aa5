"""`lockserver switchover` of a pod of real processes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.e2e.pods import AS_USERS_RUN_IT, Pod

LOCKSERVER = str(Path(sys.executable).parent / "lockserver")
DEADLINE_S = 60.0


async def switch(pod: Pod, *flags: str) -> tuple[int, dict[str, Any]]:
    """The exit code of the command, and its document or error."""
    command = (LOCKSERVER, "switchover", f"--dir={pod.directory}", "--json", *flags)
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, env={**os.environ, **AS_USERS_RUN_IT}
    )
    out, _ = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    document = json.loads(out)
    assert process.returncode is not None
    return process.returncode, document.get("error", document)

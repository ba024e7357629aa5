"""The machine that figures were measured on, and how busy it was."""

from __future__ import annotations

import os
from typing import Any

from understudy import host


def machine() -> dict[str, Any]:
    """What a reader of the figures must know of it."""
    return {**host.machine(), "load_1min": os.getloadavg()[0]}

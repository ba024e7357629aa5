"""Writes the report page: one self-contained HTML file.

The data are embedded as JSON in a script element of a data type; `<` is escaped, so nothing in them
can end that element or be taken for markup.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from plumbing.errors import UnderstudyError, UsageError
from plumbing.service.files import write_atomic

TEMPLATE = Path(__file__).parent / "page.html"
PLACE = "{{data}}"
MODE = 0o644  # meant to be shared


def check_destination(path: Path) -> None:
    """Raise if no page can be written to `path`, before a drill that takes minutes.

    Raises:
        UsageError: `drill.bad_report`.
    """
    reason = None
    if path.is_dir():
        reason = "it is a directory"
    elif not path.parent.is_dir():
        reason = f"{path.parent} is not a directory"
    elif not os.access(path.parent, os.W_OK):
        reason = f"{path.parent} is not writable"
    if reason is not None:
        raise UsageError(
            "drill.bad_report", f"--report {path}: {reason}; choose a file in a writable directory"
        )


def render(data: dict[str, Any]) -> str:
    """The page for `data`."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    before, after = TEMPLATE.read_text(encoding="utf-8").split(PLACE)
    return before + text + after


def write_page(path: Path, data: dict[str, Any]) -> None:
    """Write the page for `data` to `path`, atomically.

    Raises:
        UnderstudyError: `drill.report_not_written`.
    """
    try:
        write_atomic(str(path), render(data), MODE, survives_power_cut=False)
    except OSError as error:
        raise UnderstudyError(
            "drill.report_not_written",
            f"cannot write the report page to {path}: {error.strerror}",
        ) from error

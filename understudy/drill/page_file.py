"""Writes the report's page: one HTML file that needs nothing else, with its data inside.

The template draws; the data go into it as JSON in a script element that is no script. Nothing in
them can end that element or be taken for markup, because no `<` is left in them.
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
MODE = 0o644  # it is made to be shown around


def check_destination(path: Path) -> None:
    """Raise if no page can be written to `path`: a drill takes minutes, and this is known before.

    Raises:
        UsageError: `drill.bad_report`.
    """
    reason = None
    if path.is_dir():
        reason = "it is a directory"
    elif not path.parent.is_dir():
        reason = f"{path.parent} is not a directory"
    elif not os.access(path.parent, os.W_OK):
        reason = f"{path.parent} may not be written to"
    if reason is not None:
        raise UsageError(
            "drill.bad_report", f"--report {path}: {reason}; name a file that can be made"
        )


def render(data: dict[str, Any]) -> str:
    """The page that shows `data`."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    before, after = TEMPLATE.read_text(encoding="utf-8").split(PLACE)
    return before + text + after


def write_page(path: Path, data: dict[str, Any]) -> None:
    """Write the page that shows `data` to `path`, whole or not at all.

    Raises:
        UnderstudyError: `drill.report_not_written`.
    """
    try:
        write_atomic(str(path), render(data), MODE, survives_power_cut=False)
    except OSError as error:
        raise UnderstudyError(
            "drill.report_not_written",
            f"the report's page could not be written to {path}: {error.strerror}",
        ) from error

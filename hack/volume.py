"""How large the project is, beside its budget: `python -m hack.volume`.

Counts each package's lines, modules and code lines, the share of blanks, comments and docstrings,
and the words of the docs without generated pages. Budgets are upper bounds, not goals: a share of
prose and blanks below 28 % says that something was packed to meet one.
"""

from __future__ import annotations

import ast
import io
import tokenize
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("plumbing", "lockserver", "gms", "engine", "gateway", "pool", "understudy")
GENERATED = ("cli_json.md", "states.md")
# What a row may have at most: in the end, and after the first step (half the house).
BUDGETS: dict[str, tuple[int | None, int | None]] = {
    "plumbing": (4_000, None),
    "lockserver": (5_000, None),
    "gms": (7_000, None),
    "engine": (15_500, None),
    "gateway": (6_500, None),
    "pool": (5_000, None),
    "understudy": (6_500, None),
    "product": (52_000, 67_000),
    "modules": (300, 380),
    "hack": (6_000, 6_000),
    "tests": (55_000, 65_000),
    "docs words": (28_000, 28_000),
}
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


@dataclass
class Volume:
    """Lines of some Python files. `code` is without blanks, comments and docstrings."""

    lines: int = 0
    modules: int = 0
    code: int = 0

    @property
    def prose_share(self) -> float:
        """The share of blanks, comments and docstrings, in percent."""
        return round(100 * (1 - self.code / self.lines), 1) if self.lines else 0.0


def measure(*folders: str) -> Volume:
    """Count every Python file below these folders of the repository."""
    volume = Volume()
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        source = path.read_text()
        volume.lines += source.count("\n")
        volume.modules += 1
        volume.code += len(_code_lines(source))
    return volume


def docs_words() -> int:
    """Words of `docs/*.md`, without the pages that a program writes."""
    pages = [page for page in (ROOT / "docs").glob("*.md") if page.name not in GENERATED]
    return sum(len(page.read_text().split()) for page in pages)


def _code_lines(source: str) -> set[int]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    prose = {
        number
        for node in ast.walk(ast.parse(source))
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None
        for number in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    return {
        number
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in _LAYOUT
        for number in range(token.start[0], token.end[0] + 1)
    } - prose


def main() -> None:
    volumes = {name: measure(name) for name in (*PRODUCT, "hack", "tests")}
    volumes["product"] = measure(*PRODUCT)
    counts = {name: volume.lines for name, volume in volumes.items()}
    counts |= {"modules": volumes["product"].modules, "docs words": docs_words()}
    columns = ("now", "step", "final", "modules", "code", "prose_percent")
    print(f"{'':12}" + "".join(f"{column:>14}" for column in columns))
    for name, (final, step) in BUDGETS.items():
        volume = volumes.get(name)
        found = (volume.modules, volume.code, volume.prose_share) if volume else (None,) * 3
        cells = (counts[name], step, final, *found)
        print(f"{name:12}" + "".join(f"{'-' if cell is None else cell:>14}" for cell in cells))


if __name__ == "__main__":
    main()

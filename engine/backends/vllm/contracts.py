"""What this backend relies on in vLLM, read from vLLM's sources: nothing of it is imported.

    python -m engine.backends.vllm.contracts [a wheel, or a directory that holds vllm/]

Owns two kinds of contract. Every name that a file of this package imports from vLLM is there: that
list is read from our own sources, so it cannot be forgotten. And what we call, override or count on
without calling has the form that it had when it was read: that list is below, each with the file of
ours that would break. Needs neither vLLM nor torch, so a wheel of a version that nobody has
installed yet can be asked.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from plumbing.errors import UsageError

HERE = Path(__file__).resolve().parent
PACKAGE = "vllm"

Node = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Check = Callable[[Node], bool]


class Sources:
    """vLLM's files, from a directory that holds `vllm/` or from a wheel; each is parsed once."""

    def __init__(self, path: str) -> None:
        """Raises:
        UsageError: `vllm.no_sources`, there is no vLLM in `path`.
        """
        self.path = path
        self._parsed: dict[str, ast.Module | None] = {}
        try:
            self._wheel = zipfile.ZipFile(path) if path.endswith(".whl") else None
        except (OSError, zipfile.BadZipFile) as error:
            raise UsageError("vllm.no_sources", f"cannot read {path}: {error}") from error
        if self.module("__init__.py") is None:
            raise UsageError(
                "vllm.no_sources",
                f"{path} holds no {PACKAGE}/__init__.py; name a wheel of vLLM, or the directory in"
                f" which {PACKAGE}/ lies",
            )

    def module(self, file: str) -> ast.Module | None:
        """`file`, relative to vllm/, parsed; None if there is none."""
        if file not in self._parsed:
            text = self._read(f"{PACKAGE}/{file}")
            self._parsed[file] = None if text is None else ast.parse(text)
        return self._parsed[file]

    def find(self, file: str, qualname: str) -> Node | None:
        """The class or function `qualname` (`Worker.sleep`) in `file`."""
        node: ast.AST | None = self.module(file)
        for part in qualname.split("."):
            inside = getattr(node, "body", ())
            node = next((each for each in inside if getattr(each, "name", None) == part), None)
        return node if isinstance(node, Node) else None

    def has_name(self, module: str, name: str) -> bool:
        """Whether `from module import name` finds something: a submodule, or a name of it."""
        base = module.removeprefix(PACKAGE).lstrip(".").replace(".", "/")
        for file in (f"{base}/{name}.py", f"{base}/{name}/__init__.py"):
            if self.module(file.lstrip("/")) is not None:
                return True
        found = self.module(f"{base}.py") if base else None
        found = found or self.module(f"{base}/__init__.py".lstrip("/"))
        return found is not None and name in _names(found)

    def _read(self, file: str) -> str | None:
        try:
            if self._wheel is not None:
                return self._wheel.read(file).decode()
            with open(os.path.join(self.path, file), encoding="utf-8") as stream:
                return stream.read()
        except (KeyError, FileNotFoundError, NotADirectoryError):
            return None


def installed() -> Sources:
    """The vLLM of this environment.

    Raises:
        UsageError: `vllm.no_sources`, there is none.
    """
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise UsageError("vllm.no_sources", "vLLM is not installed here; name a wheel of it")
    return Sources(os.path.dirname(os.path.dirname(found.origin)))


# ---------------------------------------------------------------- the forms that a contract checks


def exists(node: Node) -> bool:
    return True


def takes(*names: str) -> Check:
    """A function with these parameters, whatever others it has."""

    def check(node: Node) -> bool:
        if isinstance(node, ast.ClassDef):
            return False
        found = node.args
        all_of = [each.arg for each in (*found.posonlyargs, *found.args, *found.kwonlyargs)]
        return set(names) <= set(all_of)

    return check


def takes_only(*names: str) -> Check:
    """A method of which ours, with exactly these parameters, is an override."""

    def check(node: Node) -> bool:
        if isinstance(node, ast.ClassDef) or node.args.vararg or node.args.kwonlyargs:
            return False
        return [each.arg for each in node.args.args] == ["self", *names]

    return check


def says(*texts: str) -> Check:
    """Source text, in the form in which `ast.unparse` writes it: for what has no signature."""

    def check(node: Node) -> bool:
        text = ast.unparse(node)
        return all(each in text for each in texts)

    return check


def abstract_only(*names: str) -> Check:
    """A class whose abstract methods are these: a subclass that has them can be made."""

    def check(node: Node) -> bool:
        inside = [each for each in node.body if isinstance(each, ast.FunctionDef)]
        marked = {
            each.name
            for each in inside
            if any("abstractmethod" in ast.unparse(mark) for mark in each.decorator_list)
        }
        return marked == set(names)

    return check


def one_zeros_of_int8(node: Node) -> bool:
    """One `torch.zeros(size, dtype=torch.int8, device=…)`, and no other."""
    calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
    zeros = [each for each in calls if ast.unparse(each.func) == "torch.zeros"]
    if len(zeros) != 1 or len(zeros[0].args) != 1:
        return False
    named = {each.arg: ast.unparse(each.value) for each in zeros[0].keywords}
    return named.get("dtype") == "torch.int8" and "device" in named


# ---------------------------------------------------------------- asking


@dataclass(frozen=True, slots=True)
class Contract:
    """`name` is what breaks, in words; `qualname` in `file` of vLLM has the form `check`."""

    name: str
    user: str  # the file here that counts on it
    file: str
    qualname: str
    check: Check

    def holds(self, sources: Sources) -> bool:
        node = sources.find(self.file, self.qualname)
        return node is not None and self.check(node)


@dataclass(frozen=True, slots=True)
class Broken:
    """A contract that does not hold, in words for people."""

    name: str
    user: str
    where: str

    def __str__(self) -> str:
        return f"{self.name} [{self.where}; {self.user} needs it]"


def broken(sources: Sources) -> list[Broken]:
    """Every contract that `sources` do not keep."""
    from engine.backends.vllm.contract_list import CONTRACTS, PLACES

    found = [
        Broken(f"{module}.{name} can be imported", user, module)
        for user, module, name in sorted(imported())
        if not sources.has_name(module, name)
    ]
    for name, user, places in PLACES:
        if not any(sources.has_name(module, each) for module, each in places):
            found.append(Broken(name, user, " or ".join(module for module, _ in places)))
    for contract in CONTRACTS:
        if not contract.holds(sources):
            where = f"{contract.file}: {contract.qualname}"
            found.append(Broken(contract.name, contract.user, where))
    return found


def imported() -> set[tuple[str, str, str]]:
    """File, module, name: every `from vllm… import …` of this package."""
    found = set()
    for path in sorted(HERE.rglob("*.py")):
        file = path.relative_to(HERE).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
                found |= {(file, str(node.module), each.name) for each in node.names}
    return found


def _names(module: ast.Module) -> set[str]:
    """What a module defines or imports, also under an `if` or a `try`."""
    return set(_names_in(module.body))


def _names_in(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Import() | ast.ImportFrom():
                yield from (each.asname or each.name for each in node.names)
            case ast.Assign():
                yield from (each.id for each in node.targets if isinstance(each, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.If() | ast.Try():
                yield from _names_in(node.body)
                yield from _names_in(node.orelse)


def main(arguments: list[str]) -> int:
    try:
        sources = Sources(arguments[0]) if arguments else installed()
        found = broken(sources)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    for each in found:
        print(f"broken: {each}")
    print(f"{sources.path}: {len(found)} contracts are broken" if found else "every contract holds")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

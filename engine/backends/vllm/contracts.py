"""Checks what this backend relies on in vLLM by reading vLLM's sources; imports none of them.

    python -m engine.backends.vllm.contracts [a wheel, or a directory that holds vllm/]

Every name that a file of this package imports from vLLM must exist: that list is read from our own
sources. And what we call, override or rely on without calling must have the form it had when it was
read (`contracts.txt`). Needs neither vLLM nor torch, so it can check the wheel of a version that
is not installed.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from engine.backends.vllm import versions
from engine.backends.vllm.versions import FILES, runner_of
from plumbing.errors import UsageError

HERE = Path(__file__).resolve().parent
PACKAGE = "vllm"
OTHERS = "..."  # as a parameter: there may be more

Node = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Contract(Struct):
    """`name` says what holds of the class or function `qualname` of vLLM's `file`: its parameters
    but `self`, None where they do not count, and texts in its source. With `places` instead, one of
    these modules has the name that follows it."""

    name: str
    file: str = ""
    qualname: str = ""
    parameters: tuple[str, ...] | None = None
    texts: tuple[str, ...] = ()
    places: tuple[tuple[str, str], ...] = ()

    @property
    def where(self) -> str:
        modules = " or ".join(module for module, _ in self.places)
        return modules or f"{self.file}: {self.qualname}"

    def is_kept_by(self, node: Node) -> bool:
        source = ast.unparse(node)
        return self._has_parameters(node) and all(_is_in(source, text) for text in self.texts)

    def _has_parameters(self, node: Node) -> bool:
        if self.parameters is None:
            return True
        if isinstance(node, ast.ClassDef):
            return False
        given = node.args
        found = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
        if self.parameters[-1:] == (OTHERS,):
            return set(self.parameters[:-1]) <= set(found)
        # An override of ours has exactly these.
        is_open = given.vararg is not None or bool(given.kwonlyargs)
        return not is_open and found == ["self", *self.parameters]


def _is_in(source: str, text: str) -> bool:
    counted = re.fullmatch(r"(\d+)x (.+)", text)
    if counted is not None:
        return source.count(counted[2]) == int(counted[1])
    return any(each in source for each in text.split(" || "))


def read_contracts(text: str) -> dict[str, list[Contract]]:
    """The contracts by our file that relies on them, from `contracts.txt`, which says its form."""
    found: dict[str, list[Contract]] = {}
    contracts: list[Contract] = []
    for line in text.splitlines():
        depth, said = len(line) - len(line.lstrip()), line.strip()
        if not said or line.startswith("#"):
            continue
        if depth == 0:
            contracts = found[said] = []
        elif depth == 2:
            contracts.append(Contract(said))
        elif depth == 6:
            contracts[-1].texts += (said,)
        elif said.startswith("import "):
            modules = (each.rpartition(".") for each in said.removeprefix("import ").split(" or "))
            contracts[-1].places = tuple((module, name) for module, _, name in modules)
        else:
            contracts[-1].file, _, of = said.partition(": ")
            contracts[-1].qualname, is_open, names = of.removesuffix(")").partition(" (")
            if is_open:
                contracts[-1].parameters = tuple(each for each in names.split(", ") if each)
    return found


CONTRACTS = read_contracts((HERE / "contracts.txt").read_text(encoding="utf-8"))


class Sources:
    """vLLM's files, from a directory that holds `vllm/` or from a wheel; each is parsed once."""

    def __init__(self, path: str) -> None:
        """Raises:
        UsageError: `vllm.no_sources`, there is no vLLM in `path`.
        """
        self.path = path
        self._parsed: dict[str, ast.Module | None] = {}
        try:
            self._root = zipfile.Path(path) if path.endswith(".whl") else Path(path)
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
            place = self._root / PACKAGE / file
            is_there = place.is_file()
            self._parsed[file] = ast.parse(place.read_text("utf-8")) if is_there else None
        return self._parsed[file]

    def find(self, file: str, qualname: str) -> Node | None:
        """The class or function `qualname` (`Worker.sleep`) in `file`."""
        node: ast.AST | None = self.module(file)
        for part in qualname.split("."):
            inside = getattr(node, "body", ())
            node = next((each for each in inside if getattr(each, "name", None) == part), None)
        return node if isinstance(node, Node) else None

    def runners(self) -> set[str]:
        """vLLM's model runners that are there; one must be."""
        return {name for name, (file, *_) in FILES.items() if self.module(file)} or {*FILES}

    def keep(self, contract: Contract) -> bool:
        if contract.places:
            return any(self.has_name(*place) for place in contract.places)
        node = self.find(contract.file, contract.qualname)
        return node is not None and contract.is_kept_by(node)

    def has_name(self, module: str, name: str) -> bool:
        """Whether `from module import name` works: `name` is a submodule or a name in `module`."""
        base = _base_of(module)
        for file in (f"{base}/{name}.py", f"{base}/{name}/__init__.py"):
            if self.module(file.lstrip("/")) is not None:
                return True
        found = self.module(f"{base}.py") if base else None
        found = found or self.module(f"{base}/__init__.py".lstrip("/"))
        return found is not None and name in _names_in(found.body)


def installed() -> Sources:
    """The vLLM of this environment.

    Raises:
        UsageError: `vllm.no_sources`, there is none.
    """
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise UsageError("vllm.no_sources", "vLLM is not installed here; name a wheel of it")
    return Sources(str(Path(found.origin).parents[1]))


class BrokenContract(Struct, frozen=True):
    """A contract that does not hold; its text is a line of the report."""

    name: str
    user: str
    where: str

    def __str__(self) -> str:
        return f"{self.name} [{self.where}; {self.user} needs it]"


def broken(
    sources: Sources, users: str | tuple[str, ...] = "", runner: str = ""
) -> list[BrokenContract]:
    """Every contract that `sources` break; of our files, only those whose names begin with
    `users`. What only one of vLLM's model runners needs is left out, unless it is `runner`, or
    without one, unless vLLM has that runner."""
    asked = {runner} if runner else sources.runners()

    def concerns(*files: str) -> bool:
        return runner_of(*files) in {"", *asked}

    found = [
        BrokenContract(f"{module}.{name} can be imported", user, module)
        for user, module, name in sorted(imported(users))
        if concerns(user, f"{_base_of(module)}.py") and not sources.has_name(module, name)
    ]
    found += [
        BrokenContract(contract.name, user, contract.where)
        for user, contracts in CONTRACTS.items()
        if user.startswith(users)
        for contract in contracts
        if concerns(user, contract.file) and not sources.keep(contract)
    ]
    return found


def changed(sources: Sources, users: tuple[str, ...], runner: str) -> str:
    """Why vLLM cannot do what `users` need, in a sentence, or nothing."""
    found = broken(sources, users, runner)
    if not found:
        return ""
    more = f", and {len(found) - 1} more" if len(found) > 1 else ""
    version = versions.vllm_version()
    return f"vLLM {version} is not as it was when this was built: {found[0]}{more}"


@functools.cache
def imported(users: str | tuple[str, ...] = "") -> frozenset[tuple[str, str, str]]:
    """File, module, name: every `from vllm… import …` of this package, in the files whose names
    begin with `users`."""
    files = {path.relative_to(HERE).as_posix(): path for path in HERE.rglob("*.py")}
    return frozenset(
        (file, str(node.module), each.name)
        for file, path in files.items()
        if file.startswith(users)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE
        for each in node.names
    )


def _base_of(module: str) -> str:
    return module.removeprefix(PACKAGE).lstrip(".").replace(".", "/")


def _names_in(body: list[ast.stmt]) -> Iterator[str]:
    """What the body of a module defines or imports, also under an `if` or a `try`."""
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

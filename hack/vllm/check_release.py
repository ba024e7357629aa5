"""Checks a release of vLLM before it is supported, and says what to look at.

    python -m hack.vllm.check_release                       # the newest one, against the installed
    python -m hack.vllm.check_release 0.34.0 --than 0.33.0
    python -m hack.vllm.check_release vllm-0.34.0….whl

Downloads the wheels with pip and reads them; nothing of them is installed or run. Exit code 1: a
contract is broken. A contract that holds says that vLLM still does what the backend relies on. It
cannot say what vLLM does in addition. So the script lists changed code that contracts are about,
new flags, new sampling parameters and new state of requests.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from engine.backends.vllm import contracts
from engine.backends.vllm import versions as runners
from engine.backends.vllm.contracts import CONTRACTS, Sources
from hack.rig import ROOT

# What an engine does without if a contract of these files is broken; of others: it does not start.
FEATURES = {
    ("resume/", "api/continuation.py"): "streams end with their engine (class none)",
    ("kv/",): "no KV block is published or adopted",
    ("api/resting.py", "core_serving.py"): "engines do not sleep, and hand over by a relaunch",
}
ELSE = "engines may not start"


class Look(NamedTuple):
    """The fields of a class of vLLM's: what to do about a new one."""

    file: str
    name: str
    what: str
    todo: str


FIELDS = (
    Look(
        "engine/arg_utils.py",
        "EngineArgs",
        "flag",
        "if it shapes an answer, add it to FLAGS (api/continuation.py); if the runtime must own it,"
        " to OWNED (api/arguments.py)",
    ),
    Look(
        "sampling_params.py",
        "SamplingParams",
        "sampling parameter",
        "if it depends on what was made, add a kind of request to"
        " tests/vllm/resume_matrix/rows.py, and class none by name to resume/llm.py until it"
        " passes",
    ),
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hack.vllm.check_release")
    parser.add_argument("release", nargs="?", help="a version or a wheel; default: the newest")
    parser.add_argument("--than", help="compare with this version or wheel (default: installed)")
    flags = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="us-vllm-") as folder:
        new = Sources(wheel(flags.release, Path(folder)))
        old = Sources(wheel(flags.than, Path(folder))) if flags.than else contracts.installed()
        broken = list(broken_lines(new))
        print(*(broken or ["every contract holds"]), sep="\n")
        print(*changed_lines(old, new), sep="\n")
    print(
        "then: widen SUPPORTED in engine/backends/vllm/versions.py, run `make test-vllm` and, on a"
        " GPU, what docs/vllm.md lists"
    )
    return 1 if broken else 0


def wheel(asked: str | None, folder: Path) -> str:
    """The path of a wheel: `asked` itself, or downloaded into `folder`."""
    if asked is not None and asked.endswith(".whl"):
        return asked
    into = folder / (asked or "newest")
    name = "vllm" if asked is None else f"vllm=={asked}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*command, f"--dest={into}", "--only-binary=:all:", name], cwd=ROOT, check=True)
    (found,) = into.glob("*.whl")
    print(found.name)
    return str(found)


def broken_lines(new: Sources) -> Iterator[str]:
    """Each broken contract, by runner, and what an engine does without."""
    there = sorted(new.runners())
    for gone in sorted({*runners.FILES} - {*there}):
        yield f"note: model runner {gone.upper()} is gone; contracts with it do not count"
    for runner in there:
        for each in contracts.broken(new, runner=runner):
            lost = (what for files, what in FEATURES.items() if each.user.startswith(files))
            yield f"broken with {runner.upper()}: {each}\n    then {next(lost, ELSE)}"


def changed_lines(old: Sources, new: Sources) -> Iterator[str]:
    """What to look at, although contracts hold."""
    for look in FIELDS:
        for name in sorted(fields(new, look) - fields(old, look)):
            yield f"new {look.what}: {name}\n    {look.todo}"
        for name in sorted(fields(old, look) - fields(new, look)):
            yield f"{look.what} that is gone: {name}"
    about: dict[tuple[str, str], set[str]] = {}
    for user, found in CONTRACTS.items():
        for each in found:
            if each.file:
                about.setdefault((each.file, each.qualname), set()).add(user)
    for (file, qualname), users in sorted(about.items()):
        if code(old, file, qualname) not in (None, code(new, file, qualname)):
            yield f"read the difference: {file}: {qualname} ({', '.join(sorted(users))})"


def fields(sources: Sources, look: Look) -> set[str]:
    node = sources.find(look.file, look.name)
    body = node.body if node is not None else []
    return {
        each.target.id
        for each in body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }


def code(sources: Sources, file: str, qualname: str) -> str | None:
    """Without comments, formatting and docstrings; None: it is not there."""
    node = sources.find(file, qualname)
    if node is None:
        return None
    for each in ast.walk(node):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            has_docstring = ast.get_docstring(each, clean=False) is not None
            each.body = each.body[has_docstring:] or [ast.Pass()]
    return ast.unparse(node)


if __name__ == "__main__":
    sys.exit(main())

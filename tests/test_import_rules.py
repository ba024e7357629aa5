"""Goal: the direction of imports, and where each heavy library may live, hold in every file.

Method: read the sources with `ast`, imports inside functions and under TYPE_CHECKING included, and
import everything once in a process in which the GPU's libraries do not exist.
"""

import ast
import functools
import graphlib
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("plumbing", "lockserver", "gms", "engine", "gateway", "pool", "understudy")

# Who may import whom, by dotted prefix; the longest prefix that fits a module is its layer. What
# is in none of our packages is not looked at here.
PLUMBING = ("plumbing",)
BASICS = tuple(f"plumbing.{name}" for name in ("errors", "shortage", "text", "__version__"))
CLIENTS = ("gms.client", "lockserver.client")
POOL_WORDS = (
    "pool.core.events",
    "pool.core.states",
    "pool.messages",
)  # doors and demand, as both sides see them
LAYERS = {
    "plumbing": ("plumbing.errors",),
    "plumbing.entry": ("plumbing.pod.cli",),
    "plumbing.errors": (),
    "plumbing.gateway_protocol": (),
    "plumbing.text": (),
    "plumbing.wire": ("plumbing.wire", *BASICS),
    "plumbing.service": ("plumbing.service", *BASICS),
    "plumbing.pod": PLUMBING,
    "lockserver": ("lockserver", *PLUMBING),
    "gms": ("gms", *PLUMBING),
    "pool": ("pool", *CLIENTS, *PLUMBING),
    "engine": ("engine", "pool.client", *CLIENTS, *PLUMBING),
    "engine.supervisor.settings": (
        *("engine", "pool.pool_file"),
        *(*CLIENTS, *PLUMBING),
    ),
    "gateway": ("gateway", "pool.client", *POOL_WORDS, "lockserver.client", *PLUMBING),
    "gateway.core.sleep_door": ("gateway", "pool.core.who_sleeps", *POOL_WORDS, *PLUMBING),
    "gateway.server.settings": ("gateway", "pool.pool_file", *PLUMBING),
    "understudy": (
        *("understudy", "engine", "gateway", "pool", *CLIENTS, *PLUMBING),
        *("lockserver.schema", "gms.schema"),
    ),
}

# Libraries that live in a few places only: a path is a directory with its slash, or a file's name
# or beginning.
NUMERIC = ("engine/backends/reference/", "engine/backends/vllm/", "gms/torch/")
PLACES = {
    "cuda": ("gms/vmm/cuda",),
    "pynvml": ("gms/server/devices.py",),
    "torch": ("gms/torch/", "engine/backends/vllm/"),
    "vllm": ("engine/backends/vllm/",),
    "aiohttp": ("engine/backends/", "understudy/ui/"),
    "numpy": NUMERIC,
    "safetensors": NUMERIC,
    "tokenizers": NUMERIC,
    "cryptography": (),  # only tests make certificates with it
    "huggingface_hub": ("understudy/up/hub_download.py",),
}

# What `pip install .` alone does not bring, or brings for a dependency's sake: imported where it is
# needed, or by vLLM's own processes. `pynvml` is in nvidia-ml-py, `yaml` in pyyaml.
OPTIONAL = (
    *("cuda", "cryptography", "huggingface_hub", "torch", "vllm"),
    *("fastapi", "starlette", "transformers", "uvicorn"),
)
DISTRIBUTIONS = {"pynvml": "nvidia-ml-py", "yaml": "pyyaml"}

# A core is told the time and tells what should happen: it opens, logs and waits for nothing. So of
# ours it imports only what is pure, and of the standard library nothing that acts.
CORES = (
    "lockserver.core",
    "gms.core",
    "gms.kv.core",
    "engine.core",
    "engine.kv",
    "gateway.core",
    "pool.core",
)
PURE = (
    *CORES,
    *(
        "lockserver.messages",
        "gms.messages",
        "gms.manifest",
        "gms.names",
        "engine.messages",
    ),
    *("plumbing.errors", "plumbing.gateway_protocol", "plumbing.text", "plumbing.transitions"),
    "plumbing.pod.models",
    *("plumbing.pod.supervision", "plumbing.pod.messages"),
    *("plumbing.wire.messages", "plumbing.wire.limits"),
)
NOT_IN_A_CORE = (
    *("asyncio", "uvloop", "aiohttp", "socket", "select", "selectors", "signal", "subprocess"),
    *("threading", "multiprocessing", "logging", "time", "datetime", "click", "fcntl", "ssl"),
)

# Loading these at start would cost the lock server and the supervisors their memory limits.
NOT_LOADED_AT_START = (
    *("numpy", "aiohttp", "psutil", "safetensors", "tokenizers"),
    "cryptography",
)


@dataclass(frozen=True)
class Import:
    """One imported name in one file."""

    path: str
    line: int
    module: str

    def __str__(self):
        return f"{self.path}:{self.line} imports {self.module}"


def imports_of(path: str, source: str) -> Iterator[Import]:
    """Every import of the file at `path`, relative to the root; `from a import b` is `a.b`."""
    package = path.removesuffix(".py").split("/")[:-1]

    def names(node):
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            return [f"{base}.{alias.name}" for alias in node.names]
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            return [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
        return []

    for node in ast.walk(ast.parse(source)):
        for name in names(node):
            yield Import(path, node.lineno, name)


@functools.cache
def sources() -> dict[str, str]:
    return {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }


@functools.cache
def all_imports() -> list[Import]:
    return [found for path, source in sources().items() for found in imports_of(path, source)]


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def is_in(module: str, prefixes) -> bool:
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


def breaks_layers(found: Import) -> bool:
    module = module_of(found.path)
    layer = max((name for name in LAYERS if is_in(module, (name,))), key=len)
    if found.module == "plumbing":  # the package itself holds the version and nothing else
        return False
    return is_in(found.module, PACKAGES) and not is_in(found.module, LAYERS[layer])


def breaks_places(found: Import) -> bool:
    places = PLACES.get(found.module.split(".")[0])
    return places is not None and not found.path.startswith(places)


def breaks_core(found: Import) -> bool:
    if not is_in(module_of(found.path), CORES):
        return False
    is_impure = is_in(found.module, PACKAGES) and not is_in(found.module, PURE)
    return is_impure or is_in(found.module, NOT_IN_A_CORE)


def breaks_client(found: Import) -> bool:
    """Engine workers run `gms.client` beside somebody else's event loop."""
    return found.path.startswith("gms/client/") and is_in(found.module, ("asyncio", "numpy"))


def breaks_click(found: Import) -> bool:
    return is_in(found.module, ("click",)) and not re.search(r"/cli(/\w+)?\.py$", found.path)


RULES = (breaks_layers, breaks_places, breaks_core, breaks_client, breaks_click)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_no_file_breaks_the_rule(rule):
    """Goal: the rule holds everywhere; method: every import of every file."""
    assert [str(found) for found in all_imports() if rule(found)] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "forbidden", "excepted"),
    [("hack", "tests", ()), ("tests", "hack", ("tests/hack/",))],
)
def test_programs_in_hack_and_tests_do_not_import_each_other(folder, forbidden, excepted):
    """Goal: each can change without the other; only tests/hack, which tests those programs, imports
    them, and the package that stands in for a GPU serves both. Method: every import of every file
    of the folder."""
    found = [
        each
        for path in sorted((ROOT / folder).rglob("*.py"))
        for each in imports_of(path.relative_to(ROOT).as_posix(), path.read_text())
    ]
    assert found
    broken = [
        each
        for each in found
        if is_in(each.module, (forbidden,)) and not is_in(each.module, ("hack.v2_on_cpu",))
    ]
    assert [str(each) for each in broken if not each.path.startswith(excepted)] == []


def graph_of(node) -> dict[str, set[str]]:
    """Which node imports which, where `node` maps a module to the node that it belongs to."""
    modules = {module_of(path) for path in sources()}
    graph: dict[str, set[str]] = {node(module): set() for module in modules}
    for found in all_imports():
        target = found.module if found.module in modules else found.module.rpartition(".")[0]
        if target in modules:
            graph[node(module_of(found.path))].add(node(target))
    return {name: targets - {name} for name, targets in graph.items()}


def room_of(module: str) -> str:
    """The folder of a module; a file at the top of a package is a room of its own."""
    folder = module.rpartition(".")[0]
    is_at_the_top = folder in (*PACKAGES, "engine.backends") or module in PACKAGES
    is_shared = folder in ("engine.backends.reference", "engine.backends.vllm")
    return module if is_at_the_top or is_shared else folder


def circle_in(graph: dict[str, set[str]]) -> str:
    """The shortest way to say that there is none: a circle as text, or nothing."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return " → ".join(reversed(error.args[1]))
    return ""


@pytest.mark.parametrize("node", [lambda module: module, room_of], ids=["files", "rooms"])
def test_imports_have_no_circle(node):
    """Goal: arrows only run down; method: sort the graph of all imports, by file and by folder."""
    assert circle_in(graph_of(node)) == ""


def test_circle_is_found():
    """Goal: the rule can fail. Method: three nodes, one way round."""
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"a"}}).count("→") == 3


@pytest.mark.parametrize(
    ("rule", "path", "source"),
    [
        (
            breaks_layers,
            "gms/server/server.py",
            "def f():\n    from lockserver.client import LockClient",
        ),
        (breaks_layers, "engine/x.py", "from lockserver import witness"),
        (breaks_layers, "plumbing/service/x.py", "from ..wire import frames"),
        (breaks_places, "engine/supervisor/supervisor.py", "import numpy as np"),
        (breaks_places, "gms/client/client.py", "importlib.import_module('torch')"),
        (breaks_core, "engine/core/probes.py", "if TYPE_CHECKING:\n    import logging"),
        (breaks_core, "gms/core/epochs.py", "from gms.server import journal"),
        (breaks_core, "lockserver/core/leases.py", "import time"),
        (breaks_client, "gms/client/keeper.py", "import asyncio"),
        (breaks_click, "lockserver/server/server.py", "import click"),
    ],
)
def test_each_rule_catches_what_it_forbids(rule, path, source):
    """Goal: a rule that cannot fail is none; method: one forbidden line for each."""
    assert [rule(found) for found in imports_of(path, source)] == [True]


def modules_without_gpu() -> list[str]:
    """Every module that must be importable on a machine with no GPU, torch or vLLM."""
    confined = tuple(place for name in ("cuda", "torch", "vllm") for place in PLACES[name])
    return [
        path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for path in sources()
        if not path.startswith(confined) and not path.endswith("/__main__.py")
    ]


def run_importing(modules, then) -> str:
    program = textwrap.dedent(
        """
        import importlib, sys
        absent = ("torch", "vllm", "cuda", "pynvml", "huggingface_hub")
        for name in absent:
            sys.modules[name] = None  # importing it now raises ImportError
        for name in sys.argv[1].split():
            importlib.import_module(name)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program + then, " ".join(modules)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_module_imports_without_gpu_torch_or_vllm():
    """Goal: a laptop is enough; method: import all in a process where these do not exist."""
    assert run_importing(modules_without_gpu(), "print('all')") == "all\n"


def test_long_lived_processes_load_nothing_heavy_at_start():
    """Goal: memory limits of lock server, GMS and supervisor; method: what their modules load."""
    lean = [
        module
        for module in modules_without_gpu()
        if not is_in(module, ("engine.backends", "understudy"))
    ]
    heavy = run_importing(lean, f"print(*sorted(set({NOT_LOADED_AT_START}) & set(sys.modules)))")
    assert heavy.split() == []


def test_the_package_alone_brings_what_it_imports_and_reads():
    """Goal: `pip install .` is enough to run. Method: every library that is imported is one of the
    dependencies, or optional; every file that is no source is package data."""
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = {re.split(r"[^\w.-]", each)[0] for each in about["project"]["dependencies"]}
    known = {*sys.stdlib_module_names, *PACKAGES, *OPTIONAL}
    libraries = {found.module.split(".")[0] for found in all_imports()} - known
    assert {DISTRIBUTIONS.get(name, name) for name in libraries} <= listed
    data = about["tool"]["setuptools"]["package-data"]
    packaged = {f"{name.replace('.', '/')}/{file}" for name in data for file in data[name]}
    found = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert found == packaged


# Lines of each package, at most; lowered after each step towards the budgets of `hack/volume.py`.
LINES_MAX = {
    "plumbing": 6_205,
    "lockserver": 5_895,
    "gms": 8_430,
    "engine": 15_765,
    "gateway": 10_215,
    "pool": 6_650,
    "understudy": 7_725,
    "hack": 5_705,
    "tests": 61_125,
}


def test_no_package_has_more_lines_than_its_budget():
    lines = {
        package: sum(path.read_text().count("\n") for path in (ROOT / package).rglob("*.py"))
        for package in LINES_MAX
    }
    over = {package: count for package, count in lines.items() if count > LINES_MAX[package]}
    assert over == {}, "remove lines, or say in the commit why the package needs more"


def test_no_public_class_name_stands_in_two_files():
    """Goal: one name, one meaning; method: every class at the top of a module."""
    places: dict[str, list[str]] = {}
    for path, source in sources().items():
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(path)
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}

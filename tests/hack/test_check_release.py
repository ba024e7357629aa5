"""A release of vLLM that is not installed: what is broken, and what to look at."""

from __future__ import annotations

from pathlib import Path

from engine.backends.vllm.contracts import CONTRACTS, HERE, Sources
from hack.vllm.check_release import broken_lines, changed_lines

SAMPLER = "v1/worker/gpu/sample/sampler.py"


def release(base: Path, flags: str, sampler: str) -> Sources:
    files = {
        "__init__.py": "",
        "engine/arg_utils.py": f"class EngineArgs:\n    model: str = ''\n{flags}",
        SAMPLER: f"class Sampler:\n    def __init__(self):\n        {sampler}\n",
    }
    for name, text in files.items():
        path = base / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Sources(str(base))


def test_new_flags_are_named_and_new_prose_is_not(tmp_path: Path):
    old = release(tmp_path / "old", "", "'''Makes it.'''\n        self.a = 1  # one")
    new = release(tmp_path / "new", "    shape: int = 0\n", "self.a = 1\n        self.b = 2")
    found = [*changed_lines(old, new)]
    assert any(each.startswith("new flag: shape") for each in found)
    same = release(tmp_path / "same", "", "self.a = 1")
    assert [*changed_lines(old, same)] == []


def test_a_broken_contract_says_what_an_engine_does_without(tmp_path: Path):
    """An empty release breaks all of them, with both runners."""
    found = [*broken_lines(release(tmp_path, "", "pass"))]
    for lost in ("streams end", "no KV block", "do not sleep", "may not start"):
        assert any(lost in each for each in found)
    assert {each.partition(":")[0] for each in found} == {"broken with V1", "broken with V2"}


def test_contracts_name_files_of_ours_that_exist():
    """A report names the file of ours that needs the broken contract."""
    assert {user for user in CONTRACTS if not (Path(HERE) / user).exists()} == set()

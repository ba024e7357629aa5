"""The installed vLLM keeps every contract, and each contract can fail: vLLM's sources are read
unchanged, and with one thing removed or changed."""

from __future__ import annotations

import ast
import copy
from typing import Any

import pytest

from engine.backends.vllm import contracts, versions
from engine.backends.vllm.contracts import CONTRACTS, Sources


class Altered(Sources):
    """vLLM's sources, with `instead` in the place of one class or function."""

    def __init__(self, whole: Sources, file: str, qualname: str, instead: str) -> None:
        super().__init__(whole.path)
        assert whole.find(file, qualname) is not None, f"{qualname} is not in {file}"
        tree = with_instead(whole.module(file), qualname.split("."), ast.parse(instead).body)
        self._parsed |= whole._parsed | {file: tree}


class Without(Sources):
    """vLLM's sources, without the files of some model runners."""

    def __init__(self, whole: Sources, *gone: str) -> None:
        super().__init__(whole.path)
        self._parsed, self._gone = whole._parsed, gone

    def module(self, file: str) -> ast.Module | None:
        if versions.runner_of(file) in getattr(self, "_gone", ()):
            return None
        return super().module(file)


def with_instead(tree: Any, names: list[str], instead: list[ast.stmt]) -> Any:
    """`tree`, with `instead` for the first class or function of these names."""
    found = next(each for each in tree.body if getattr(each, "name", None) == names[0])
    new = [with_instead(found, names[1:], instead)] if names[1:] else instead
    place = tree.body.index(found)
    copied = copy.copy(tree)
    copied.body = [*tree.body[:place], *new, *tree.body[place + 1 :]]
    return copied


@pytest.fixture(scope="module")
def whole() -> Sources:
    return contracts.installed()


def test_the_installed_vllm_keeps_every_contract(whole):
    assert [str(each) for each in contracts.broken(whole)] == []


def test_each_contract_fails_with_its_name(whole, monkeypatch):
    """Take out what a contract names, from all places where it may be: its name is in the report.
    Give it another form: likewise, unless being there is all that is asked of it."""
    for user, contract in ((user, each) for user, needed in CONTRACTS.items() for each in needed):
        if contract.file and whole.module(contract.file) is None:
            continue  # one of vLLM's runners is gone
        if contract.places:
            has_name = whole.has_name
            places = contract.places
            with monkeypatch.context() as gone:
                gone.setattr(
                    whole,
                    "has_name",
                    lambda *at, places=places, has_name=has_name: (
                        at not in places and has_name(*at)
                    ),
                )
                assert contract.name in [each.name for each in contracts.broken(whole, user)]
            continue
        gone = Altered(whole, contract.file, contract.qualname, "pass")
        assert contract.name in [each.name for each in contracts.broken(gone, user)]
        name = contract.qualname.rpartition(".")[2]
        is_class = isinstance(whole.find(contract.file, contract.qualname), ast.ClassDef)
        other = f"class {name}: ..." if is_class else f"def {name}(something_else): ..."
        changed = Altered(whole, contract.file, contract.qualname, other)
        asks_for_more = contract.parameters is not None or contract.texts
        assert changed.keep(contract) != bool(asks_for_more), contract.name


@pytest.mark.parametrize(("gone", "left"), [("v1", "v2"), ("v2", "v1")])
def test_contracts_of_a_runner_that_is_gone_hold(whole, gone: str, left: str):
    """Remove the files of one runner, as vLLM will those of V1: nothing is broken for the other
    one, nor for whoever asks about no runner. An engine that runs the removed one is told."""
    if left not in whole.runners():
        pytest.skip(f"this vLLM has no {left}")
    sources = Without(whole, gone)
    assert contracts.broken(sources, "", left) == []
    assert contracts.broken(sources) == []
    assert contracts.broken(sources, "", gone) != []


def test_a_changed_runner_is_nothing_to_an_engine_with_the_other_one(whole):
    """Take one function out of V2: only engines with V2 are told."""
    contract = next(each for each in CONTRACTS["resume/__init__.py"] if "/gpu/" in each.file)
    gone = Altered(whole, contract.file, contract.qualname, "pass")
    told = {each: contracts.changed(gone, ("resume/",), each) for each in whole.runners()}
    assert contract.name in told.pop("v2")
    assert set(told.values()) <= {""}


def test_a_place_without_vllm_is_refused(tmp_path, capsys):
    """Name an empty directory, and a file that is no wheel: exit code 2 and what is wrong."""
    assert contracts.main([str(tmp_path)]) == 2
    assert "name a wheel of vLLM" in capsys.readouterr().err
    broken = tmp_path / "broken.whl"
    broken.write_bytes(b"no zip")
    assert contracts.main([str(broken)]) == 2
    assert "cannot read" in capsys.readouterr().err

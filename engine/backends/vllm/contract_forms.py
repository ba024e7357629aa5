"""What a contract with vLLM is, and the forms that it can ask of a class or function of vLLM's."""

from __future__ import annotations

import ast
from collections.abc import Callable

from msgspec import Struct

Node = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Check = Callable[[Node], bool]


class Contract(Struct, frozen=True):
    """`name` says what holds: the class or function `qualname` of vLLM's `file` has the form that
    `check` asks for."""

    name: str
    file: str
    qualname: str
    check: Check


def within(file: str) -> Callable[[str, str, Check], Contract]:
    """Makes the contracts with one file of vLLM's."""
    return lambda name, qualname, check: Contract(name, file, qualname, check)


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


def contains(*texts: str) -> Check:
    """Source text, in the form in which `ast.unparse` writes it: for what has no signature."""

    def check(node: Node) -> bool:
        text = ast.unparse(node)
        return all(each in text for each in texts)

    return check


def lacks(*names: str) -> Check:
    """A class that has no methods of these names of its own."""

    def check(node: Node) -> bool:
        return not set(names) & {getattr(each, "name", "") for each in node.body}

    return check


def every(*checks: Check) -> Check:
    """All of these."""
    return lambda node: all(check(node) for check in checks)


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

"""A YAML file as plain values, with the line of each: errors about a value can name its place.

Duplicate keys are refused, of which PyYAML would take the last one.
"""

from __future__ import annotations

import difflib
import os
import unicodedata
from collections.abc import Iterable
from typing import Any, NoReturn

from msgspec import Struct

from plumbing.errors import UsageError
from plumbing.text import one_line

FILE_BYTES_MAX = 1 << 20  # a hundred models with all their settings have 50 KiB
NODES_MAX = 50_000  # with anchors, a small file can describe an endless one

Path = tuple[str | int, ...]


class YamlFile(Struct, frozen=True):
    """`lines`: by path, from 1."""

    path: str
    value: Any
    lines: dict[Path, int]

    def refuse(self, code: str, where: Path, why: str) -> NoReturn:
        """
        Raises:
            UsageError: `code`, with the line of `where` or of what it is in.
        """
        known = where
        while known not in self.lines and known:
            known = known[:-1]
        line = self.lines.get(known, 1)
        key = one_line(".".join(map(str, where)))
        place = f"{self.path}:{line}" + (f": {key}" if key else "")
        raise UsageError(code, f"{place}: {why}", file=self.path, line=line, key=key)

    def refuse_control_characters(self, code: str, several_lines: str) -> None:
        """A name with a line end forges a line of a log, and one with a surrogate cannot be sent.
        Below the key `several_lines`, values may have tabs and line ends.

        Raises:
            UsageError: `code`.
        """

        def look(where: Path, value: Any) -> None:
            if isinstance(value, dict):
                for key, each in value.items():
                    check((*where, key), key, "")
                    look((*where, key), each)
            elif isinstance(value, list):
                for number, each in enumerate(value):
                    look((*where, number), each)
            elif isinstance(value, str):
                check(where, value, "\t\n" if several_lines in where else "")

        def check(where: Path, text: str, allowed: str) -> None:
            for char in text:
                if unicodedata.category(char) in ("Cc", "Cs") and char not in allowed:
                    what = f"it has the control character U+{ord(char):04X}"
                    self.refuse(code, where, f"{what}; remove it")

        look((), self.value)


def closest(name: str, known: Iterable[str]) -> str:
    """`did you mean "priority"?`, or all that is known."""
    names = sorted(known)
    found = difflib.get_close_matches(name, names, 1)
    return f"did you mean {found[0]!r}?" if found else f"known are {', '.join(names)}"


def read_yaml(path: str) -> YamlFile:
    """
    Raises:
        UsageError: `pool.file_unreadable`, `pool.file_broken`.
    """
    try:
        if os.stat(path).st_size > FILE_BYTES_MAX:
            why = f"it is larger than {FILE_BYTES_MAX} bytes"
            raise UsageError("pool.file_unreadable", f"cannot read the pool file {path}: {why}")
        with open(path, encoding="utf-8") as stream:
            text = stream.read()
    except (OSError, UnicodeDecodeError) as error:
        why = str(error.strerror) if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(
            "pool.file_unreadable", f"cannot read the pool file {path}: {why}", file=path
        ) from error
    return parse(path, text)


def parse(path: str, text: str) -> YamlFile:
    """As `read_yaml`, of `text`."""
    import yaml  # a pool reads one file, at its start

    lines: dict[Path, int] = {}
    checked: set[int] = set()
    try:
        loader = yaml.SafeLoader(text)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        why = f"a YAML file has no character U+{error.character:04X}; remove it"
        raise UsageError(
            "pool.file_broken", f"{path}:{line}: {why}", file=path, line=line
        ) from error
    loader.name = path  # for the places in its errors

    def plain(node: Any, where: Path) -> Any:
        lines.setdefault(where, node.start_mark.line + 1)
        if len(lines) > NODES_MAX:
            raise ValueError(f"it describes more than {NODES_MAX} values")
        if isinstance(node, yaml.SequenceNode):
            return [plain(each, (*where, n)) for n, each in enumerate(node.value)]
        if not isinstance(node, yaml.MappingNode):
            return loader.construct_object(node)
        if id(node) not in checked:  # an anchor's mapping is met again, with what was merged
            checked.add(id(node))
            _refuse_duplicates(node)
            loader.flatten_mapping(node)  # `<<`: what is merged comes first, and is overridden
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            # As it is written: `off` is the name of a model, and not false.
            key = str(key_node.value if isinstance(key_node, yaml.ScalarNode) else key_node.tag)
            lines[(*where, key)] = key_node.start_mark.line + 1
            found[key] = plain(value_node, (*where, key))
        return found

    try:
        node = loader.get_single_node()
        value = None if node is None else plain(node, ())
    except RecursionError as error:
        raise UsageError("pool.file_broken", f"{path} is nested too deeply", file=path) from error
    # The others come from invalid dates, booleans and numbers.
    except (yaml.YAMLError, ValueError, KeyError, AttributeError, TypeError) as error:
        why = " ".join(str(error).split())
        raise UsageError(
            "pool.file_broken", f"{path} is not valid YAML: {why}", file=path
        ) from error
    finally:
        loader.dispose()
    return YamlFile(path, value, lines)


def _refuse_duplicates(mapping: Any) -> None:
    lines: dict[Any, int] = {}
    for key, _ in mapping.value:
        if isinstance(key.value, str) and key.value != "<<":
            line = key.start_mark.line + 1
            if key.value in lines:
                where = f"at line {lines[key.value]} and again at line {line}"
                raise ValueError(f"{key.value!r} stands {where}; remove one of them")
            lines[key.value] = line

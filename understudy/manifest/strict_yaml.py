"""YAML as Kubernetes takes it: a key that is there twice is refused, and so is a bomb.

Owns what PyYAML lets through: of two equal keys it takes the last one, aliases of aliases may stand
for more than any memory holds, and what is no date or nested too deeply ends in any exception.
"""

from __future__ import annotations

from typing import Any

import yaml

# What aliases stand for, written out; a pod's manifest has some thousand values.
VALUES_MAX = 200_000
MERGE = "tag:yaml.org,2002:merge"


class NotYamlError(Exception):
    """The text cannot be taken, and why."""


def load_all(text: str) -> list[Any]:
    """Every document of `text`.

    Raises:
        NotYamlError: with what is wrong and where.
    """
    loader = yaml.SafeLoader(text)
    try:
        found = []
        while loader.check_node():
            node = loader.get_node()
            assert node is not None  # there is one
            _count(node, {}, set())
            found.append(loader.construct_document(node))
        return found
    except yaml.YAMLError as error:
        raise NotYamlError(" ".join(str(error).split())) from error
    except RecursionError as error:
        raise NotYamlError("it is nested too deeply") from error
    except (ValueError, KeyError, AttributeError) as error:  # of what is tagged as a date or a flag
        raise NotYamlError(str(error)) from error
    finally:
        loader.dispose()


def _count(node: yaml.Node, counted: dict[int, int], within: set[int]) -> int:
    """How many values `node` stands for with its aliases written out."""
    known = counted.get(id(node))
    if known is not None:
        return known
    if id(node) in within:
        raise NotYamlError(f"what begins at {_place(node)} contains itself")
    within.add(id(node))
    count = 1
    if isinstance(node, yaml.MappingNode):
        _refuse_twins(node)
    if isinstance(node, yaml.CollectionNode):
        for part in node.value:
            for each in part if isinstance(part, tuple) else (part,):
                count += _count(each, counted, within)
    if count > VALUES_MAX:
        raise NotYamlError(
            f"what begins at {_place(node)} stands for more than {VALUES_MAX} values"
        )
    within.remove(id(node))
    counted[id(node)] = count
    return count


def _refuse_twins(mapping: yaml.MappingNode) -> None:
    seen = set()
    for key, _ in mapping.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag == MERGE:
            continue
        if key.value in seen:
            raise NotYamlError(f"the key {key.value!r} at {_place(key)} is there already")
        seen.add(key.value)


def _place(node: yaml.Node) -> str:
    return f"line {node.start_mark.line + 1}"

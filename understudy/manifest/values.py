"""The final variables and arguments of a container, and what `--set` changes of them.

Pure. Owns the kubelet's `$(NAME)`, the sources of a variable's value, and the five kinds of values
that differ between machines. Values of `--set` are treated as if they were in the manifest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from plumbing.errors import UsageError
from understudy.manifest.spec import ContainerSpec, PodManifest, Variable

PORT_MAX = 65535
LOCAL_IP = "127.0.0.1"  # of the pod and its node, which are this machine
REFERENCE = re.compile(r"\$(?:\$|\(([^)]*)\))")
FIELD_WITH_KEY = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")
KINDS = ("volume", "env", "config", "port", "flag")


@dataclass(frozen=True, slots=True)
class Choice:
    """One `--set KIND.NAME=VALUE`."""

    kind: str
    name: str
    value: str

    def __str__(self) -> str:
        return f"{self.kind}.{self.name}={self.value}"


def read_choice(text: str) -> Choice:
    """Parse the value of `--set`.

    Raises:
        ValueError: with the valid forms.
    """
    what, equals, value = text.partition("=")
    kind, dot, name = what.partition(".")
    if not (equals and dot and name) or kind not in KINDS:
        raise ValueError(f"must be one of {', '.join(f'{each}.NAME=VALUE' for each in KINDS)}")
    if kind == "port" and not (value.isdecimal() and 1 <= int(value) <= PORT_MAX):
        raise ValueError(f"a port must be a number from 1 to {PORT_MAX}")
    return Choice(kind, name, value)


@dataclass(frozen=True, slots=True)
class Choices:
    """All values that were set, by kind and name; the last one wins."""

    volume: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, str] = field(default_factory=dict)
    port: Mapping[str, int] = field(default_factory=dict)
    flag: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, choices: Iterable[Choice]) -> Choices:
        by_kind: dict[str, dict[str, str]] = {kind: {} for kind in KINDS}
        for choice in choices:
            by_kind[choice.kind][choice.name] = choice.value
        ports = {name: int(value) for name, value in by_kind.pop("port").items()}
        return cls(**by_kind, port=ports)

    def check(self, manifest: PodManifest) -> None:
        """Raise if one of them would have no effect.

        Raises:
            UsageError: `manifest.needless_set`.
        """
        words = [word for spec in manifest.specs for word in spec.command]
        known = {
            "volume": set(manifest.volumes),
            "config": {key for each in manifest.config_maps.values() for key in each},
            "port": set(manifest.ports()),
            "flag": {found[1] for word in words if (found := re.match(r"--([\w-]+)=", word))},
        }
        for kind, names in known.items():
            for name in getattr(self, kind):
                if name not in names:
                    raise UsageError(
                        "manifest.needless_set",
                        f"--set {kind}.{name}: the manifest has no such {kind}; it has "
                        f"{', '.join(sorted(names)) or 'none'}",
                    )


def expand(text: str, values: Mapping[str, str]) -> str:
    """`text` with each `$(NAME)` of `values` replaced and `$$` as `$`; the rest stays."""

    def replaced(match: re.Match[str]) -> str:
        if match[1] is None:
            return "$"
        return values.get(match[1], match[0])

    return REFERENCE.sub(replaced, text)


def variables(
    spec: ContainerSpec, manifest: PodManifest, choices: Choices, fields: Mapping[str, str]
) -> dict[str, str]:
    """The container's environment, in the kubelet's order: ConfigMaps first, then each variable,
    which may refer to those before it. `fields`: the pod's, by path.

    Raises:
        UsageError: `manifest.no_value`, a required value is not available here.
    """
    config_maps = {
        name: {key: choices.config.get(key, value) for key, value in data.items()}
        for name, data in manifest.config_maps.items()
    }
    found: dict[str, str] = {}
    for source in spec.env_from:
        data = config_maps.get(source.config_map)
        if data is None and not source.is_optional:
            raise _no_value(spec, "its environment", f"ConfigMap {source.config_map}")
        found |= {source.prefix + key: value for key, value in (data or {}).items()}
    for variable in spec.env:
        value = _value(spec, variable, config_maps, fields, found)
        if variable.name in choices.env:
            value = choices.env[variable.name]
        if value is not None:
            found[variable.name] = value
    return {**found, **choices.env}


def arguments(spec: ContainerSpec, values: Mapping[str, str], choices: Choices) -> tuple[str, ...]:
    """The command line, expanded, with the flags that were set; a flag set to "" is left out."""
    found = []
    for word in spec.command:
        name, equals, _ = word.removeprefix("--").partition("=")
        if word.startswith("--") and equals and name in choices.flag:
            if not choices.flag[name]:
                continue
            word = f"--{name}={choices.flag[name]}"
        found.append(expand(word, values))
    return tuple(found)


def replace_paths(text: str, places: Mapping[str, str]) -> str:
    """`text` with the mount paths at its beginning, or after a `=`, replaced by directories.
    `places`: directories by mount path."""
    if not places:
        return text
    longest_first = sorted(places, key=len, reverse=True)
    pattern = rf"(^|=)({'|'.join(map(re.escape, longest_first))})(?=/|$)"
    return re.sub(pattern, lambda match: match[1] + places[match[2]], text)


def replace_paths_within(text: str, places: Mapping[str, str]) -> str:
    """A whole file with the mount paths in it, where a word begins, replaced by directories."""
    if not places:
        return text
    longest_first = sorted(places, key=len, reverse=True)
    pattern = rf"(?<![^\s\"'=:,\[{{(])({'|'.join(map(re.escape, longest_first))})(?![\w.-])"
    return re.sub(pattern, lambda match: places[match[1]], text)


def replace_ports(command: Sequence[str], moved: Mapping[int, int]) -> tuple[str, ...]:
    """`command` with other ports, where an argument ends in `:PORT` or is `--…port=PORT`."""

    def replaced(match: re.Match[str]) -> str:
        number = int(match[2])
        return f"{match[1]}{moved.get(number, number)}"

    return tuple(re.sub(r"^(.*:|--[\w-]*port=)(\d{1,5})$", replaced, word) for word in command)


def pod_fields(manifest: PodManifest, uid: str, node: str) -> dict[str, str]:
    """The values for `fieldRef`, by path."""
    found = {
        "metadata.name": f"{manifest.name}-0",
        "metadata.namespace": manifest.namespace,
        "metadata.uid": uid,
        "spec.nodeName": node,
        "spec.serviceAccountName": "default",
        "status.hostIP": LOCAL_IP,
        "status.hostIPs": LOCAL_IP,
        "status.podIP": LOCAL_IP,
        "status.podIPs": LOCAL_IP,
    }
    found |= {f"metadata.labels['{key}']": text for key, text in manifest.labels.items()}
    notes = manifest.annotations.items()
    return found | {f"metadata.annotations['{key}']": text for key, text in notes}


def _value(
    spec: ContainerSpec,
    variable: Variable,
    config_maps: Mapping[str, Mapping[str, str]],
    fields: Mapping[str, str],
    before: Mapping[str, str],
) -> str | None:
    """The variable's value; None if it is optional and not available."""
    if variable.value is not None:
        return expand(variable.value, before)
    if variable.field_path:
        if variable.field_path in fields:
            return fields[variable.field_path]
        if FIELD_WITH_KEY.fullmatch(variable.field_path):
            return ""  # like the kubelet, for a missing label
        raise _no_value(spec, variable.name, f"field {variable.field_path}")
    value = config_maps.get(variable.config_map, {}).get(variable.key)
    if value is None and not variable.is_optional:
        raise _no_value(spec, variable.name, f"{variable.key} of ConfigMap {variable.config_map}")
    return value


def _no_value(spec: ContainerSpec, what: str, source: str) -> UsageError:
    return UsageError(
        "manifest.no_value",
        f"container {spec.name} takes {what} from {source}, which is not available; add it to the "
        "manifest, or set the variable with --set env.NAME=VALUE",
    )

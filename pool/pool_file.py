"""Reads the pool file: which models there are, where, and by which rules they share the devices.

Every value is checked before anything is started, and an error names the line, the key and the way
out. The same checks are made of what is set at runtime.

The YAML is read as plain values with the line of each, so that an error can name its place.
Duplicate keys are refused, of which PyYAML would take the last one.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, get_args

from msgspec import Struct, ValidationError, convert
from msgspec.structs import fields, replace

from plumbing.errors import UsageError
from plumbing.pod.gms_files import read_device_names
from plumbing.pod.models import MODELS_MAX, NAME_PATTERN
from plumbing.service.config import duration_s, size_bytes
from plumbing.text import one_line
from pool.settings import (
    DeviceName,
    DrainTimeout,
    ModelMemory,
    ModelSettings,
    Period,
    PoolFile,
    QueueLimits,
    SecondsOrNever,
    Size,
    engines_of,
)

S = TypeVar("S", bound=Struct)

WEEK_S = 7 * 24 * 3600.0
FOR_EVER = ("never", "off", "False", "-1")  # YAML reads `off` as false; -1 as in Ollama
_DEVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")  # as in `gms.names`

# What may be changed while the pool runs, without touching what a model is.
DRAIN_SETTINGS = frozenset(DrainTimeout.__struct_fields__)
MODEL_SETTINGS = DRAIN_SETTINGS | {
    *("priority", "rest", "min_runtime", "max_wait", "keep_alive", "offload_after"),
    *("unload_after", "on_demand", "max_in_flight", "client_priority"),
}
POOL_SETTINGS = frozenset({"margin", "starve_after", "quantum_factor"})

# What an engine's arguments may not say, since all parts of the pod must know it: the setting.
OWN_ARGUMENTS: Mapping[str, str] = {
    "--model": "model",
    "--served-model-name": "aliases",
    "--tensor-parallel": "tensor_parallel",
    "--tensor-parallel-size": "tensor_parallel",
    "-tp": "tensor_parallel",
}

# What `defaults` may say: all but what makes a model this one.
DEFAULTS = frozenset(ModelSettings.__struct_fields__) - {"model", "aliases", "devices", "memory"}


def read_pool_file(path: str) -> PoolFile:
    """
    Raises:
        UsageError: `pool.file_unreadable`, `pool.file_broken`, `pool.bad_setting`.
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
    return settle(parse(path, text))


NO_MODELS = "a pool file is a mapping with `devices` and at least one of `models`"


def settle(file: YamlFile) -> PoolFile:
    """The settings in `file`, checked; defaults and devices are filled in for every model.

    Raises:
        UsageError: `pool.bad_setting`.
    """
    raw = file.value
    if not isinstance(raw, dict):
        file.refuse((), NO_MODELS)
    pool = _convert(file, (), {**raw, "models": {}, "defaults": {}}, PoolFile)
    if not isinstance(raw.get("models"), dict) or not raw["models"]:
        file.refuse((), NO_MODELS)
    if len(raw["models"]) > MODELS_MAX:
        file.refuse(("models",), f"{len(raw['models'])} models, and the limit is {MODELS_MAX}")
    defaults = raw.get("defaults") or {}
    for key in defaults if isinstance(defaults, dict) else ():
        if key not in DEFAULTS:
            file.refuse(("defaults", key), f"unknown in defaults; {closest(key, DEFAULTS)}")
    if not isinstance(defaults, dict):
        file.refuse(("defaults",), "expected a mapping")
    _convert(file, ("defaults",), {"model": "-", **defaults}, ModelSettings)  # each line its own
    models = {}
    for name, own in raw["models"].items():
        where = ("models", name)
        if not re.fullmatch(NAME_PATTERN, name):
            why = "a name has at most 25 letters, digits, `.` or `-`; add a longer one to `aliases`"
            file.refuse(where, why)
        if not isinstance(own, dict):
            file.refuse(where, "a model is a mapping with at least `model`, its directory")
        models[name] = _convert(file, where, _merged(defaults, own), ModelSettings)
    return _checked(file, pool, models)


def named(pool: PoolFile, names: Sequence[str]) -> PoolFile:
    """With the names of its devices in place of their numbers: `names` are in the file's order.

    Raises:
        UsageError: `pool.bad_device`.
    """
    if names and len(names) != len(pool.devices):
        why = f"the pool file has {len(pool.devices)} devices, and {len(names)} are named"
        raise UsageError("pool.bad_device", f"{why}; name each, in the same order")
    found = dict(zip(pool.devices, names or pool.devices, strict=True))
    for number, name in found.items():
        if name.isdecimal() or not _DEVICE.fullmatch(name):
            raise UsageError("pool.bad_device", f"{name!r} is not a device; see `gms status`")
        twice = next((each for each in found if found[each] == name and each != number), None)
        if twice is not None:
            why = f"{number} and {twice} of the pool file are both {name}; remove one of them"
            raise UsageError("pool.bad_device", why)
    models = {
        name: replace(each, devices=tuple(found[device] for device in each.devices))
        for name, each in pool.models.items()
    }
    return replace(pool, devices=tuple(found.values()), models=models)


def with_served_names(pool: PoolFile, directory: str) -> PoolFile:
    """With the names of its devices: a number counts those that the memory service in `directory`
    serves, so that it means the same device in every process of the pod.

    Raises:
        UsageError: `pool.unnamed_device`, `pool.bad_device`.
    """
    served = read_device_names(directory) if any(map(str.isdecimal, pool.devices)) else ()
    names: list[str] = []
    for device in pool.devices:
        if device.isdecimal() and int(device) >= len(served):
            has = f"it serves {len(served)}: {', '.join(served)}" if served else "none has started"
            raise UsageError(
                "pool.unnamed_device",
                f"device {device} of the pool file counts the devices of the memory service in"
                f" {directory}, and {has}; start `gms serve` first, or name the devices in the pool"
                " file: HOST-0, GPU-<uuid>",
            )
        names.append(served[int(device)] if device.isdecimal() else device)
    return named(pool, names)


def with_changes(pool: PoolFile, changed: Mapping[str, Mapping[str, str]]) -> PoolFile:
    """With what was set at runtime, by model ("": the whole pool) and setting.

    Raises:
        UsageError: `pool.unknown_setting`, `pool.bad_setting`, `model_not_found`.
    """
    models = dict(pool.models)
    for name, settings in changed.items():
        if name and name not in models:
            raise UsageError("model_not_found", f"this pool has no model {name}")
        for key, text in settings.items():
            if name:
                models[name] = _changed(models[name], MODEL_SETTINGS, key, text)
            else:
                pool = _changed(pool, POOL_SETTINGS, key, text)
    return replace(pool, models=models)


def _changed(found: S, known: frozenset[str], key: str, text: str) -> S:
    """`found` with one setting from the text that a person has written."""
    if key not in known:
        raise UsageError(
            "pool.unknown_setting",
            f"{key!r} cannot be set while the pool runs; {closest(key, known)}",
        )
    if isinstance(found, ModelSettings) and key in DRAIN_SETTINGS:
        drain = _changed(found.drain_timeout, DRAIN_SETTINGS, key, text)
        return replace(found, drain_timeout=drain)
    kinds = {each.name: each.type for each in fields(found)}
    if kinds[key] is bool:
        text = _BOOLS.get(text.lower(), text)
    try:
        value = convert(text, kinds[key], strict=False, dec_hook=_read)
    except ValidationError as error:
        raise UsageError(
            "pool.bad_setting", f"{key} is {text!r}: {_plain(str(error), kinds[key])}"
        ) from error
    return replace(found, **{key: value})


def _checked(file: YamlFile, pool: PoolFile, models: dict[str, ModelSettings]) -> PoolFile:
    """What no value tells by itself."""
    try:
        _ = pool.address
    except ValueError as error:
        file.refuse(("listen",), str(error))
    if pool.queue.per_model > pool.queue.max:
        if ("queue", "per_model") in file.lines:
            why = f"{pool.queue.per_model} is more than the {pool.queue.max} of the whole queue"
            file.refuse(("queue", "per_model"), why)
        pool = replace(pool, queue=replace(pool.queue, per_model=pool.queue.max))
    _refuse_duplicate(file, ("devices",), pool.devices)
    for device in pool.devices:
        if not _DEVICE.fullmatch(device):
            file.refuse(("devices",), f"{device!r} is not a device; see `gms status`")
    owners: dict[str, str] = {name: name for name in models}
    engines: dict[str, str] = {}
    used: Counter[str] = Counter()
    settled = {}
    for name, model in models.items():
        for alias in model.aliases:
            if owners.setdefault(alias, name) != name:
                why = f"{alias!r} is a name of {owners[alias]} already; remove one of them"
                file.refuse(("models", name, "aliases"), why)
        for engine in engines_of(name, model):
            if engines.setdefault(engine, name) != name:
                why = f"its engine would be called {engine}, as that of {engines[engine]}"
                file.refuse(("models", name), f"{why}; rename one of the two")
        for argument in model.args:
            flag = str(argument).partition("=")[0].replace("_", "-")
            if flag in OWN_ARGUMENTS:
                why = f"{flag} is not an argument here; use the key `{OWN_ARGUMENTS[flag]}`"
                file.refuse(("models", name, "args"), why)
        own = _devices(file, name, model, pool.devices, used)
        used.update(own)
        settled[name] = replace(model, devices=own)
    return replace(pool, models=settled)


def _devices(
    file: YamlFile, name: str, model: ModelSettings, all_: Sequence[str], used: Counter[str]
) -> tuple[str, ...]:
    """Where this model runs: as it says, else on the devices with the fewest models so far."""
    where, ranks = ("models", name, "devices"), model.tensor_parallel
    for device in model.devices:
        if device not in all_:
            file.refuse(where, f"{device} is none of the pool's `devices`: {', '.join(all_)}")
    _refuse_duplicate(file, where, model.devices)
    if model.devices and len(model.devices) != ranks:
        why = f"{len(model.devices)} devices, and tensor_parallel is {ranks}: one for each rank"
        file.refuse(where, why)
    if ranks > len(all_):
        why = f"{ranks} ranks need {ranks} devices, and the pool has {len(all_)}"
        file.refuse(("models", name, "tensor_parallel"), why)
    emptiest = sorted(all_, key=lambda each: (used[each], all_.index(each)))[:ranks]
    return model.devices or tuple(each for each in all_ if each in emptiest)


def _refuse_duplicate(file: YamlFile, where: Path, devices: Sequence[str]) -> None:
    twice = [name for name, count in Counter(devices).items() if count > 1]
    if twice:
        file.refuse(where, f"{twice[0]} is named twice; remove one of them")


def _merged(defaults: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A model's own words over the defaults, also inside of `drain_timeout`."""
    merged = {**defaults, **own}
    for key, value in own.items():
        if isinstance(value, dict) and isinstance(defaults.get(key), dict):
            merged[key] = {**defaults[key], **value}
    return merged


def _convert(file: YamlFile, where: Path, raw: Any, kind: type[S]) -> S:
    try:
        return convert(raw, kind, dec_hook=_read)
    except ValidationError as error:
        reason, _, place = str(error).partition(" - at `$")
        inner = tuple(re.findall(r"[^.\[\]`]+", place))
        if "..." in place:  # a key of `models`, which is checked before
            inner = ()
        unknown = re.fullmatch(r"Object contains unknown field `(.*)`", reason)
        if unknown:
            known = _keys_at(kind, inner)
            file.refuse((*where, *inner, unknown[1]), f"unknown; {closest(unknown[1], known)}")
        missing = re.fullmatch(r"Object missing required field `(.*)`", reason)
        if missing:
            file.refuse((*where, *inner), f"`{missing[1]}` is missing")
        kinds = {each.name: each.type for each in fields(kind)}
        file.refuse((*where, *inner), _plain(reason, kinds.get(inner[-1] if inner else "")))


def _keys_at(kind: type[Any], inner: tuple[str, ...]) -> Sequence[str]:
    inner_kinds = {"drain_timeout": DrainTimeout, "queue": QueueLimits, "memory": ModelMemory}
    found: Any = inner_kinds.get(inner[-1], kind) if inner else kind
    return tuple(found.__struct_fields__)


def _read(kind: type[Any], value: Any) -> Any:
    """For `convert`: a time or a size, from text or a number.

    Raises:
        ValueError: it is neither, or out of range.
    """
    text = str(value)
    if kind is DeviceName:
        return DeviceName(text)
    if kind is Size:
        return Size(0 if text in ("none", "None", "0") else size_bytes(text))
    if kind is SecondsOrNever and text in FOR_EVER:
        return SecondsOrNever(math.inf)
    seconds = duration_s(text)
    if seconds > WEEK_S:
        raise ValueError("the maximum is a week (168h)")
    if kind is Period and seconds < 1:
        raise ValueError("the minimum is 1s")
    return kind(seconds)


_BOOLS = {"yes": "true", "on": "true", "no": "false", "off": "false"}  # as YAML reads them

# What msgspec calls things, in plain words.
_WORDS = {
    "`int`": "a whole number",
    "`float`": "a number",
    "`str`": "a string",
    "`bool`": "true or false",
    "`array`": "a list",
    "`object`": "a mapping",
    "`null`": "nothing",
}


def _plain(reason: str, kind: object) -> str:
    """`reason`, for people; `kind` is what was expected."""
    invalid = re.fullmatch(r"Invalid enum value '(.*)'", reason)
    if invalid:
        return f"{invalid[1]!r} is unknown; {closest(invalid[1], get_args(kind))}"
    for word, plain in _WORDS.items():
        reason = reason.replace(word, plain)
    reason = re.sub(r"`([^`]*)`", lambda found: _any_of(found[1]), reason)
    return reason[:1].lower() + reason[1:]


def _any_of(types: str) -> str:
    """`object | null` → `a mapping or nothing`."""
    return " or ".join(_WORDS.get(f"`{each}`", each) for each in types.split(" | "))


FILE_BYTES_MAX = 1 << 20  # a hundred models with all their settings have 50 KiB
NODES_MAX = 50_000  # with anchors, a small file can describe an endless one

Path = tuple[str | int, ...]


class YamlFile(Struct, frozen=True):
    """`lines`: by path, from 1."""

    path: str
    value: Any
    lines: dict[Path, int]

    def refuse(self, where: Path, why: str) -> NoReturn:
        """
        Raises:
            UsageError: `pool.bad_setting`, with the line of `where` or of what it is in.
        """
        known = where
        while known not in self.lines and known:
            known = known[:-1]
        line = self.lines.get(known, 1)
        key = one_line(".".join(map(str, where)))
        place = f"{self.path}:{line}" + (f": {key}" if key else "")
        message = f"{place}: {why}"
        raise UsageError("pool.bad_setting", message, file=self.path, line=line, key=key)


def closest(name: str, known: Iterable[str]) -> str:
    """`did you mean "priority"?`, or all that is known."""
    names = sorted(known)
    found = difflib.get_close_matches(name, names, 1)
    return f"did you mean {found[0]!r}?" if found else f"known are {', '.join(names)}"


def parse(path: str, text: str) -> YamlFile:
    """The file at `path`, as plain values. A name with a line end forges a line of a log, and one
    with a surrogate cannot be sent: only `args` have tabs and line ends.

    Raises:
        UsageError: `pool.file_broken`, `pool.bad_setting`.
    """
    import yaml  # a pool reads one file, at its start

    lines: dict[Path, int] = {}
    checked: set[int] = set()
    strange: list[tuple[Path, str]] = []  # characters
    try:
        loader = yaml.SafeLoader(text)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        why = f"a YAML file has no character U+{error.character:04X}; remove it"
        raise UsageError(
            "pool.file_broken", f"{path}:{line}: {why}", file=path, line=line
        ) from error
    loader.name = path  # for the places in its errors

    def look(where: Path, text: str, allowed: str = "") -> None:
        kinds = {char: unicodedata.category(char) for char in text if char not in allowed}
        strange.extend((where, char) for char, kind in kinds.items() if kind in ("Cc", "Cs"))

    def plain(node: Any, where: Path) -> Any:
        lines.setdefault(where, node.start_mark.line + 1)
        if len(lines) > NODES_MAX:
            raise ValueError(f"it describes more than {NODES_MAX} values")
        if isinstance(node, yaml.SequenceNode):
            return [plain(each, (*where, n)) for n, each in enumerate(node.value)]
        if not isinstance(node, yaml.MappingNode):
            look(where, node.value, "\t\n" if "args" in where else "")
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
            look((*where, key), key)
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
    file = YamlFile(path, value, lines)
    for where, char in strange[:1]:
        file.refuse(where, f"it has the control character U+{ord(char):04X}; remove it")
    return file


def _refuse_duplicates(mapping: Any) -> None:
    lines: dict[Any, int] = {}
    for key, _ in mapping.value:
        if isinstance(key.value, str) and key.value != "<<":
            line = key.start_mark.line + 1
            if key.value in lines:
                where = f"at line {lines[key.value]} and again at line {line}"
                raise ValueError(f"{key.value!r} stands {where}; remove one of them")
            lines[key.value] = line

"""The pool file: which models there are, where, and by which rules they share the devices.

Every value is checked before anything is started, and an error names the line, the key and the way
out. The same checks are made of what is set at runtime. The YAML is read as plain values; times and
sizes are then read as people write them (`5m`, `20GiB`), and the rest is the structs' business.

`digests` compares what runs with what the file says now.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, NoReturn, TypeVar, get_args

import msgspec
from msgspec import Meta, Struct, ValidationError, convert, field
from msgspec.structs import fields, replace

from plumbing.errors import UsageError
from plumbing.pod.models import MODELS_MAX, NAME_PATTERN
from plumbing.pod.paths import read_device_names
from plumbing.service.config import duration_s, size_bytes
from plumbing.text import one_line, split_address
from pool.core.states import (
    PRIORITY_MAX,
    TICKETS_MAX,
    DeviceName,
    ModelRules,
    PoolRules,
    key_of,
)

S = TypeVar("S", bound=Struct)

DEVICES_MAX = 64
WEEK_S = 7 * 24 * 3600.0
PER_MODEL = 128  # requests that may wait for one model, or as many as may wait in all

# A name with a line end forges a line of a log, and one with a surrogate cannot be sent.
Name = Annotated[
    str, Meta(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f-\x9f\ud800-\udfff]*\Z")
]
Argument = Annotated[str, Meta(pattern=r"^[^\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]*\Z")]


class QueueLimits(Struct, frozen=True, forbid_unknown_fields=True, rename=key_of):
    """How many requests may wait, in all and for one model, and for how long."""

    max: Annotated[int, Meta(ge=1, le=TICKETS_MAX)] = 512
    per_model: Annotated[int, Meta(ge=1, le=TICKETS_MAX)] = PER_MODEL
    wait_ms: float = 300_000.0


class ModelMemory(Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes that one engine needs on each of its devices, for a model that was never measured."""

    weights: int
    kv: int
    base: int = 0


class ModelSettings(ModelRules, frozen=True, kw_only=True):
    """One model, with what `defaults` say for all. `devices`: by name, once the file is read."""

    model: Name
    backend: Name = "vllm"
    args: Annotated[tuple[Argument | int | float, ...], Meta(max_length=256)] = ()
    aliases: Annotated[tuple[Name, ...], Meta(max_length=32)] = ()
    tensor_parallel: Annotated[int, Meta(ge=1, le=DEVICES_MAX)] = 1
    memory: ModelMemory | None = None
    preload: bool = False  # load it when the pool starts
    max_in_flight: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    client_priority: Annotated[int, Meta(ge=-PRIORITY_MAX, le=PRIORITY_MAX)] | None = None


class PoolFile(PoolRules, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole file; `models` by name, in its order."""

    devices: Annotated[tuple[DeviceName, ...], Meta(min_length=1, max_length=DEVICES_MAX)]
    models: dict[str, ModelSettings]
    listen: Name = "127.0.0.1:8000"
    host_memory: int = 0  # bytes for copies of weights; 0: there are none
    queue: QueueLimits = QueueLimits()
    defaults: dict[str, Any] = field(default_factory=dict)

    @property
    def address(self) -> tuple[str, int]:
        """Where clients connect: host and port.

        Raises:
            ValueError: `listen` is not an address.
        """
        return split_address(self.listen)


def engines_of(model: str, settings: ModelSettings) -> tuple[str, ...]:
    """The ids of a model's engines: the primary, and the shadow if it has one. An id has no dot."""
    stem = model.replace(".", "-")
    return (f"{stem}-0",) if settings.shadow == "none" else (f"{stem}-0", f"{stem}-1")


def digests(file: PoolFile) -> dict[str, str]:
    """By model, and of the rest under `""`. `defaults` are in the models' own settings already."""
    parts = {"": replace(file, models={}, defaults={}), **file.models}
    texts = {name: msgspec.json.encode(each, order="sorted") for name, each in parts.items()}
    return {name: hashlib.sha256(text).hexdigest()[:12] for name, text in texts.items()}


# -------------------------------------------------------------------------------------- reading

# Keys whose values are times, and whether they may be infinite; and those of sizes.
TIMES = {
    **dict.fromkeys(("min_runtime", "max_wait", "park", "wait", "starve_after"), False),
    **dict.fromkeys(("keep_alive", "offload_after", "unload_after", "cut"), True),
}
SIZES = frozenset({"margin", "host_memory", "weights", "kv", "base"})
FOR_EVER = ("never", "off", "False", "-1")  # YAML reads `off` as false; -1 as in Ollama

# What may be changed while the pool runs, without touching what a model is.
MODEL_SETTINGS = frozenset(
    {
        *("priority", "rest", "min_runtime", "max_wait", "keep_alive", "offload_after", "park"),
        *("unload_after", "on_demand", "max_in_flight", "client_priority", "cut"),
    }
)
POOL_SETTINGS = frozenset({"margin", "starve_after", "quantum_factor"})

# What an engine's arguments may not say, since all parts of the pod must know it: the setting.
OWN_ARGUMENTS: Mapping[str, str] = {
    "--model": "model",
    "--served-model-name": "aliases",
    "--tensor-parallel": "tensor_parallel",
    "--tensor-parallel-size": "tensor_parallel",
    "-tp": "tensor_parallel",
}
DRAIN = ("park", "cut")  # keys of `drain_timeout`
# What `defaults` may say: all but what makes a model this one.
DEFAULTS = {each.encode_name for each in fields(ModelSettings)} | {"drain_timeout"}
DEFAULTS -= {"model", "aliases", "devices", "memory", *DRAIN}

STRUCTS = (PoolFile, ModelSettings, QueueLimits, ModelMemory)
KEYS = {each.encode_name for kind in STRUCTS for each in fields(kind)}

Path = tuple[str, ...]
NO_MODELS = "a pool file is a mapping with `devices` and at least one of `models`"


class YamlFile(Struct, frozen=True):
    """A file at `path`, as plain values."""

    path: str
    text: str
    value: Any

    def refuse(self, where: Path, why: str) -> NoReturn:
        """
        Raises:
            UsageError: `pool.bad_setting`, with the line of `where` or of what it is in.
        """
        line, key = self._line(where), one_line(".".join(where))
        message = f"{self.path}:{line}{f': {key}' if key else ''}: {why}"
        raise UsageError("pool.bad_setting", message, file=self.path, line=line, key=key)

    def _line(self, where: Path) -> int:
        import yaml

        node = yaml.compose(self.text, yaml.SafeLoader)
        line = 0 if node is None else node.start_mark.line
        for key in where:
            pairs = node.value if isinstance(node, yaml.MappingNode) else ()
            found = next((pair for pair in pairs if pair[0].value == key), None)
            if found is None:
                break
            line, node = found[0].start_mark.line, found[1]
        return int(line) + 1


def read_pool_file(path: str) -> PoolFile:
    """
    Raises:
        UsageError: `pool.file_unreadable`, `pool.file_broken`, `pool.bad_setting`.
    """
    try:
        with open(path, encoding="utf-8") as stream:
            return settle(parse(path, stream.read()))
    except (OSError, UnicodeDecodeError) as error:
        why = str(error.strerror) if isinstance(error, OSError) else "it is not UTF-8 text"
        message = f"cannot read the pool file {path}: {why}"
        raise UsageError("pool.file_unreadable", message, file=path) from error


def parse(path: str, text: str) -> YamlFile:
    """The file at `path`. A key is what is written: `off` is the name of a model, and not false.

    Raises:
        UsageError: `pool.file_broken`.
    """
    import yaml  # a pool reads one file, at its start

    class Loader(yaml.SafeLoader):
        pass

    def mapping(loader: Any, node: Any) -> dict[str, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if key.value != "<<" and lines.setdefault(str(key.value), line) != line:
                where = f"at line {lines[str(key.value)]} and again at line {line}"
                raise ValueError(f"{key.value!r} stands {where}; remove one of them")
        loader.flatten_mapping(node)  # what is merged comes first, and is overridden
        pairs = node.value
        return {str(key.value): loader.construct_object(value, deep=True) for key, value in pairs}

    Loader.add_constructor("tag:yaml.org,2002:map", mapping)
    try:
        return YamlFile(path, text, yaml.load(text, Loader))
    # The others come from invalid dates, booleans and numbers.
    except (yaml.YAMLError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as e:
        why = " ".join(str(e).split()).replace('"<unicode string>", ', "")
        raise UsageError("pool.file_broken", f"{path} is not valid YAML: {why}", file=path) from e


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
    defaults = _model(file, ("defaults",), raw.get("defaults") or {})
    for key in defaults:
        if key not in (*DEFAULTS, *DRAIN):
            file.refuse(("defaults", key), f"unknown in defaults; {closest(key, DEFAULTS)}")
    _convert(file, ("defaults",), {"model": "-", **defaults}, ModelSettings)  # each line its own
    models = {}
    for name, own in raw["models"].items():
        where = ("models", name)
        if not re.fullmatch(NAME_PATTERN, name):
            why = "a name has at most 25 letters, digits, `.` or `-`; add a longer one to `aliases`"
            file.refuse(where, why)
        models[name] = _convert(file, where, defaults | _model(file, where, own), ModelSettings)
    return _checked(file, pool, models)


def _model(file: YamlFile, where: Path, raw: Any) -> dict[str, Any]:
    """Its settings, those of `drain_timeout` among them."""
    if not isinstance(raw, dict):
        file.refuse(where, "expected a mapping, such as `chat: {model: /models/A}`")
    drain = raw.get("drain_timeout", {})
    place = (*where, "drain_timeout")
    if not isinstance(drain, dict):
        file.refuse(place, "expected a mapping, such as `{park: 2s, cut: 30s}`")
    for key in drain:
        if key not in DRAIN:
            file.refuse((*place, key), f"unknown; {closest(key, DRAIN)}")
    found = {key: value for key, value in raw.items() if key != "drain_timeout"}
    return _values(file, where, found) | _values(file, place, drain)


def _values(file: YamlFile, where: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """With times in ms, sizes in bytes, and devices' names, from what people write."""
    found = {}
    for key, value in raw.items():
        try:
            found[key] = _value(key, value)
        except ValueError as error:
            file.refuse((*where, key), str(error))
        if isinstance(value, dict):
            found[key] = _values(file, (*where, key), value)
    return found


def _value(key: str, value: Any) -> Any:
    """
    Raises:
        ValueError: it is no time or no size, or out of range.
    """
    if isinstance(value, list):
        return [str(each) for each in value] if key == "devices" else value
    if isinstance(value, dict) or key not in (*TIMES, *SIZES):
        return value
    text = str(value)
    if key in SIZES:
        return 0 if text in ("none", "None", "0") else size_bytes(text)
    if TIMES[key] and text in FOR_EVER:
        return math.inf
    seconds = duration_s(text)
    if seconds > WEEK_S:
        raise ValueError("the maximum is a week (168h)")
    if key == "starve_after" and seconds < 1:
        raise ValueError("the minimum is 1s")
    return seconds * 1000


def _convert(file: YamlFile, where: Path, raw: Mapping[str, Any], kind: type[S]) -> S:
    try:
        return convert(_values(file, where, raw) if kind is PoolFile else raw, kind)
    except ValidationError as error:
        reason, _, place = str(error).partition(" - at `$")
        inner = tuple(re.findall(r"[^.\[\]`]+", place))
        unknown = re.fullmatch(r"Object contains unknown field `(.*)`", reason)
        if unknown:
            file.refuse((*where, *inner, unknown[1]), f"unknown; {closest(unknown[1], KEYS)}")
        if inner[:1] and inner[0] in DRAIN:
            where = (*where, "drain_timeout")
        types = {each.encode_name: each.type for each in fields(kind)}
        file.refuse((*where, *inner), _plain(reason, types.get(inner[0]) if inner else kind))


def _plain(reason: str, kind: object) -> str:
    """What msgspec says, for people; `kind` is what was expected."""
    invalid = re.fullmatch(r"Invalid enum value '(.*)'", reason)
    if invalid:
        return f"{invalid[1]!r} is unknown; {closest(invalid[1], get_args(kind))}"
    if "matching regex" in reason:
        return "it has characters that are not possible here"
    return reason[:1].lower() + reason[1:].replace("`", "")


def closest(name: str, known: Iterable[str]) -> str:
    """`did you mean "priority"?`, or all that is known."""
    names = sorted(known)
    found = difflib.get_close_matches(name, names, 1)
    return f"did you mean {found[0]!r}?" if found else f"known are {', '.join(names)}"


# -------------------------------------------------------------------------------------- checks


def _checked(file: YamlFile, pool: PoolFile, models: dict[str, ModelSettings]) -> PoolFile:
    """What no value tells by itself."""
    try:
        _ = pool.address
    except ValueError as error:
        file.refuse(("listen",), str(error))
    if pool.queue.per_model > pool.queue.max:
        if "per_model" in file.value["queue"]:
            why = f"{pool.queue.per_model} is more than the {pool.queue.max} of the whole queue"
            file.refuse(("queue", "per_model"), why)
        pool = replace(pool, queue=replace(pool.queue, per_model=pool.queue.max))
    _refuse_duplicate(file, ("devices",), pool.devices)
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


def with_served_names(pool: PoolFile, directory: str) -> PoolFile:
    """With the names of its devices: a number counts those that the memory service in `directory`
    serves, so that it means the same device in every process of the pod.

    Raises:
        UsageError: `pool.unnamed_device`, `pool.bad_setting`.
    """
    served = read_device_names(directory) if any(map(str.isdecimal, pool.devices)) else ()
    found: dict[str, str] = {}
    for device in pool.devices:
        if device.isdecimal() and int(device) >= len(served):
            has = f"it serves {len(served)}: {', '.join(served)}" if served else "none has started"
            raise UsageError(
                "pool.unnamed_device",
                f"device {device} of the pool file counts the devices of the memory service in"
                f" {directory}, and {has}; start `gms serve` first, or name the devices in the pool"
                " file: HOST-0, GPU-<uuid>",
            )
        name = served[int(device)] if device.isdecimal() else device
        twice = next((each for each in found if found[each] == name), None)
        if twice is not None:
            why = f"{twice} and {device} of the pool file are both {name}; remove one of them"
            raise UsageError("pool.bad_setting", why)
        found[device] = name
    models = {
        name: replace(each, devices=tuple(found[device] for device in each.devices))
        for name, each in pool.models.items()
    }
    return replace(pool, devices=tuple(found.values()), models=models)


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
        why = f"{key!r} cannot be set while the pool runs; {closest(key, known)}"
        if key in MODEL_SETTINGS:
            why = f"{key!r} is a model's setting: add --model MODEL"
        raise UsageError("pool.unknown_setting", why)
    setting = next(each for each in fields(found) if each.encode_name == key)
    words = {"yes": "true", "on": "true", "no": "false", "off": "false"}  # as YAML reads them
    value = words.get(text.lower(), text) if setting.type is bool else text
    try:
        value = convert(_value(key, value), setting.type, strict=False)
    except ValueError as error:
        why = _plain(str(error), setting.type)
        raise UsageError("pool.bad_setting", f"{key} is {text!r}: {why}") from error
    return replace(found, **{setting.name: value})

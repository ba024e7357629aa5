"""Goal: flag > environment > default, with origins, and refusals that say where."""

import pytest

from plumbing.errors import UsageError
from plumbing.service.config import Option, duration_s, resolve, size_bytes

OPTIONS = (
    Option("http_port", int, default=9400, minimum=0, maximum=65535),
    Option("window_ms", float, default=10_000.0),
    Option("service", str, default=(), many=True),
    Option("memory", str, default="host", choices=("host", "cuda")),
    Option("verify", bool, default=False),
    Option("engine_id", str, env="ENGINE_ID"),
    Option("device_bytes", size_bytes, default=2**30),
)


def test_each_origin_beats_the_next():
    """Goal: the order of origins; method: take the strongest away one after the other."""
    environ = {"UNDERSTUDY_HTTP_PORT": "2"}

    def port(flags, environ):
        resolved = resolve(OPTIONS, flags, environ)
        return resolved["http_port"], resolved.origin("http_port")

    assert port({"http_port": "1"}, environ) == (1, "flag")
    assert port({"http_port": None}, environ) == (2, "environment")
    assert port({}, {}) == (9400, "default")


@pytest.mark.parametrize(
    ("name", "raw", "reason"),
    [
        ("http_port", "many", "it must be a whole number"),
        ("http_port", "65536", "the maximum is 65535"),
        ("http_port", "-1", "the minimum is 0"),
        ("window_ms", "soon", "it must be a number"),
        ("memory", "disk", "it must be one of host, cuda"),
        ("verify", "perhaps", "it must be true or false"),
        ("device_bytes", "4GB", "one of the units KiB, MiB, GiB, TiB"),
        ("device_bytes", "9" * 20, "the maximum is 4194304TiB"),
    ],
)
def test_bad_value_names_its_origin_and_the_reason(name, raw, reason):
    """Goal: nobody searches in the wrong place; method: the same value as flag and variable."""
    flag = "--" + name.replace("_", "-")
    with pytest.raises(UsageError, match=reason) as by_flag:
        resolve(OPTIONS, {name: raw}, {})
    assert flag in by_flag.value.message
    assert by_flag.value.code == "config.bad_value"
    with pytest.raises(UsageError, match=f"UNDERSTUDY_{name.upper()}"):
        resolve(OPTIONS, {}, {f"UNDERSTUDY_{name.upper()}": raw})


@pytest.mark.parametrize(
    ("read", "text", "expected"),
    [
        (size_bytes, "4GiB", 4 * 2**30),
        (size_bytes, "1.5 MiB", 3 * 2**19),
        (size_bytes, "17", 17),
        (size_bytes, "2kib", 2048),
        (duration_s, "5", 5),
        (duration_s, "1.5 s", 1.5),
        (duration_s, "200ms", 0.2),
        (duration_s, "1H", 3600),
    ],
)
def test_sizes_and_times_have_units(read, text, expected):
    assert read(text) == expected


@pytest.mark.parametrize("text", ["", "s", "-5s", "5 days", "5s5s", "inf"])
def test_duration_s_refuses_anything_else(text):
    with pytest.raises(ValueError, match="such as 5s"):
        duration_s(text)

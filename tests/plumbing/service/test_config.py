"""Goal: flag > environment > file > default, with origins, and refusals that say where."""

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


@pytest.fixture
def write_file(tmp_path):
    def write(text):
        path = tmp_path / "understudy.toml"
        path.write_text(text)
        return str(path)

    return write


def test_each_origin_beats_the_next(write_file):
    """Goal: the order of origins; method: take the strongest away one after the other."""
    file = write_file("[lockserver]\nhttp_port = 3\n")
    environ = {"UNDERSTUDY_HTTP_PORT": "2"}

    def port(flags, environ, file):
        resolved = resolve(OPTIONS, flags, environ, file, command="lockserver")
        return resolved["http_port"], resolved.origin("http_port")

    assert port({"http_port": "1"}, environ, file) == (1, "flag")
    assert port({"http_port": None}, environ, file) == (2, "environment")
    assert port({}, {}, file) == (3, "file")
    assert port({}, {}, None) == (9400, "default")


def test_file_table_of_another_command_is_not_read(write_file):
    """Goal: one file for all commands; method: only another table is there."""
    file = write_file("[gms]\nhttp_port = 3\n")
    assert resolve(OPTIONS, {}, {}, file, command="lockserver")["http_port"] == 9400


def test_file_may_use_the_spelling_of_flags_and_native_types(write_file):
    """Goal: TOML as people write it; method: hyphens, numbers, booleans, lists."""
    file = write_file("[x]\nhttp-port = 1\nverify = true\nservice = ['a', 'b']\nwindow_ms = 5\n")
    resolved = resolve(OPTIONS, {}, {}, file, command="x")
    assert resolved["http_port"] == 1
    assert resolved["verify"] is True
    assert resolved["service"] == ("a", "b")
    assert resolved["window_ms"] == 5.0


def test_environment_names_and_lists():
    """Goal: a given name, the default name and commas; method: one environment of all three."""
    environ = {
        "ENGINE_ID": "engine-7",
        "UNDERSTUDY_SERVICE": "active=1:80, spare=1:81",
        "UNDERSTUDY_VERIFY": "Yes",
        "UNDERSTUDY_ENGINE_ID": "not this one",
    }
    resolved = resolve(OPTIONS, {}, environ, None)
    assert resolved["engine_id"] == "engine-7"
    assert resolved["service"] == ("active=1:80", "spare=1:81")
    assert resolved["verify"] is True


def test_describe_lists_every_setting_in_order():
    """Goal: what --print-config shows; method: the first entry and the names."""
    described = resolve(OPTIONS, {"http_port": "1"}, {}, None).describe()
    assert described[0] == {
        "name": "http_port",
        "value": 1,
        "origin": "flag",
        "env": "UNDERSTUDY_HTTP_PORT",
        "flag": "--http-port",
    }
    assert [entry["name"] for entry in described] == [option.name for option in OPTIONS]


@pytest.mark.parametrize(
    ("name", "raw", "reason"),
    [
        ("http_port", "many", "it must be a whole number"),
        ("http_port", "1.5", "it must be a whole number"),
        ("http_port", "65536", "the maximum is 65535"),
        ("http_port", "-1", "the minimum is 0"),
        ("window_ms", "soon", "it must be a number"),
        ("memory", "disk", "it must be one of host, cuda"),
        ("verify", "perhaps", "it must be true or false"),
        ("device_bytes", "4GB", "one of the units KiB, MiB, GiB, TiB"),
        ("device_bytes", "9" * 20, "the maximum is 4194304TiB"),
        ("device_bytes", "9" * 400, "the maximum is 4194304TiB"),
    ],
)
def test_bad_value_names_its_origin_and_the_reason(name, raw, reason):
    """Goal: nobody searches in the wrong place; method: the same value as flag and variable."""
    flag = "--" + name.replace("_", "-")
    with pytest.raises(UsageError, match=reason) as by_flag:
        resolve(OPTIONS, {name: raw}, {}, None)
    assert flag in by_flag.value.message
    assert by_flag.value.code == "config.bad_value"
    with pytest.raises(UsageError, match=f"UNDERSTUDY_{name.upper()}"):
        resolve(OPTIONS, {}, {f"UNDERSTUDY_{name.upper()}": raw}, None)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("[x]\nhttp_prot = 1\n", "config.unknown_key"),
        ("[x\n", "config.file_broken"),
        ("x = 1\n", "config.file_broken"),
        ("[x]\nhttp_port = true\n", "config.bad_value"),
        ("[x]\nhttp_port = [1]\n", "config.bad_value"),
        ("[x]\nverify = 1\n", "config.bad_value"),
        ("[x]\nservice = 'a'\n", "config.bad_value"),
    ],
)
def test_bad_file_is_a_usage_error_that_names_it(write_file, text, code):
    """Goal: a broken file stops the start with a sentence; method: one file per way to break."""
    file = write_file(text)
    with pytest.raises(UsageError, match=r"understudy\.toml") as caught:
        resolve(OPTIONS, {}, {}, file, command="x")
    assert caught.value.code == code


def test_missing_file_is_a_usage_error(tmp_path):
    """Goal: a missing path is exit code 2; method: a path that does not exist."""
    with pytest.raises(UsageError, match="No such file") as caught:
        resolve(OPTIONS, {}, {}, str(tmp_path / "none.toml"))
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [("4GiB", 4 * 2**30), ("1.5 MiB", 3 * 2**19), ("17", 17), ("2kib", 2048), ("1TiB", 2**40)],
)
def test_size_bytes_reads_binary_units(text, expected):
    """Goal: sizes as the documents write them; method: a table."""
    assert size_bytes(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("300s", 300),
        ("5", 5),
        ("1.5 s", 1.5),
        ("200ms", 0.2),
        ("2m", 120),
        ("1H", 3600),
    ],
)
def test_duration_s_reads_units(text, expected):
    """Goal: times as the documents write them, a plain number in seconds; method: a table."""
    assert duration_s(text) == expected


@pytest.mark.parametrize("text", ["9000h", "9" * 400])
def test_duration_s_refuses_what_no_clock_counts(text):
    with pytest.raises(ValueError, match="a year"):
        duration_s(text)


@pytest.mark.parametrize("text", ["", "s", "-5s", "5 days", "5s5s", "inf"])
def test_duration_s_refuses_anything_else(text):
    """Goal: no misunderstanding; method: what people may try."""
    with pytest.raises(ValueError, match="such as 5s"):
        duration_s(text)

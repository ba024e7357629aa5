"""Goal: a pool file means what it says, and an error in it names line, key and way out.

Method: the example of the specification, and one fault at a time.
"""

import math

import pytest

from plumbing.errors import UsageError
from plumbing.pod.messages import Tier
from plumbing.pod.paths import write_device_names
from pool.pool_file import engines_of, parse, settle, with_served_names

EXAMPLE = """\
listen: 0.0.0.0:8000
devices: [0, 1]
host_memory: 200GiB
margin: 512MiB
queue: {max: 512, per_model: 128, wait: 300s}
defaults: {keep_alive: 5m, min_runtime: 10s, drain_timeout: {park: 1s, cut: 20s}}
models:
  chat:  {backend: vllm, model: /models/A, args: [--kv-cache-memory-bytes, 20G],
          aliases: [gpt-4o-mini], pinned: true, shadow: keeps}
  coder: {backend: vllm, model: /models/B, tensor_parallel: 2}
  batch: {model: /models/C, priority: 10, min_runtime: 30s, rest: offloaded, keep_alive: -1,
          drain_timeout: {cut: never}, unload_after: off}
"""


def read(text):
    return settle(parse("pool.yaml", text))


def test_example_means_what_it_says():
    pool = read(EXAMPLE)
    chat, coder, batch = pool.models["chat"], pool.models["coder"], pool.models["batch"]
    assert (pool.devices, pool.host_memory, pool.margin_bytes) == (
        ("0", "1"),
        200 << 30,
        512 << 20,
    )
    assert (chat.is_pinned, chat.shadow) == (True, "keeps")
    assert (engines_of("chat", chat), engines_of("v2.5", coder)) == (
        ("chat-0", "chat-1"),
        ("v2-5-0",),
    )
    assert (chat.keep_alive_ms, chat.park_ms, chat.cut_ms) == (3e5, 1e3, 2e4)
    assert (batch.rest, batch.min_runtime_ms) == (Tier.OFFLOADED, 3e4)
    # The rest of `drain_timeout` is that of the defaults; `never` and `off` are no time at all.
    assert batch.park_ms == 1e3
    assert batch.cut_ms == batch.unload_after_ms == batch.keep_alive_ms == math.inf


def test_models_without_devices_are_spread_in_the_order_of_the_file():
    """Goal: a file without placements is served, and always alike. Method: `chat` takes the first
    device, `coder` both, so that `batch` finds fewer on the second."""
    pool = read(EXAMPLE)
    assert [each.devices for each in pool.models.values()] == [("0",), ("0", "1"), ("1",)]


def test_merged_anchors_are_overridden_and_no_duplicates():
    text = """\
devices: [HOST-0]
models:
  a: &small {model: /m/a, priority: 3}
  b: {<<: *small, model: /m/b}
  c: {<<: *small, model: /m/c, priority: 4}
"""
    models = read(text).models
    assert [(each.model, each.priority) for each in models.values()] == [
        ("/m/a", 3),
        ("/m/b", 3),
        ("/m/c", 4),
    ]


SMALL = """\
devices: [HOST-0, HOST-1]
models:
  chat:
    model: /models/A
    priority: 1
  coder: {model: /models/B, devices: [HOST-1]}
"""


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("priority: 1", "priority: high", 5, "models.chat.priority: expected int"),
        ("priority: 1", "prioriti: 1", 5, "did you mean 'priority'?"),
        ("priority: 1", "keep_alive: soon", 5, "such as 5s"),
        ("priority: 1", "max_wait: 1000h", 5, "the maximum is a week"),
        ("priority: 1", "rest: awake", 5, "rest: 'awake' is unknown; known are cold, offloaded"),
        ("priority: 1", "memory: 3GiB", 5, "got str"),
        ("priority: 1", "memory: {weights: 20GiB}", 5, "missing required field kv"),
        ("priority: 1", "drain_timeout: {parc: 2s}", 5, "did you mean 'park'?"),
        ("priority: 1", "tensor_parallel: 3", 5, "the pool has 2"),
        ("priority: 1", "aliases: [coder]", 5, "is a name of coder already"),
        ("priority: 1", "devices: [HOST-2]", 5, "is none of the pool's `devices`"),
        ("priority: 1", "devices: [HOST-0, HOST-1]", 5, "one for each rank"),
        ("priority: 1", "args: [--served_model_name=x]", 5, "use the key `aliases`"),
        ("priority: 1", "model: /models/C", 5, "stands at line 4 and again at line 5"),
        ("    model: /models/A\n", "", 3, "missing required field model"),
        ("  coder:", "  my_coder:", 6, "at most 25"),
        ("[HOST-0, HOST-1]", "[HOST-0, HOST-0]", 1, "named twice"),
        ("devices: [HOST-0, HOST-1]\n", "margin: 1GiB\n", 1, "missing required field devices"),
        ("models:", "defaults: {model: /x}\nmodels:", 2, "unknown in defaults"),
        ("models:", "queue: {max: 9, per_model: 10}\nmodels:", 2, "the 9 of the whole queue"),
        ("models:", "starve_after: 0\nmodels:", 2, "the minimum is 1s"),
        ("models:", "listen: localhost\nmodels:", 2, "is not HOST:PORT, such as 127.0.0.1:8000"),
        ("[HOST-0, HOST-1]", "[HOST-0, HOST.1]", 1, "not possible here"),
        ("models:", "modells:", 2, "did you mean 'models'?"),
        (SMALL, "devices: [0]", 1, "at least one of `models`"),
        ("models:", "models: [", 0, "pool.yaml is not valid YAML: while"),
        ("priority: 1", 'aliases: ["x\\ny"]', 5, "aliases.0: it has characters that"),
        ("priority: 1", 'aliases: ["\\ud800"]', 5, "not possible here"),
        ("priority: 1", 'args: ["a\\0b"]', 5, "chat.args.0: it has characters"),
        ("  chat:", '  "c\\nt":', 3, "models.c\\nt: a name has at most"),
        ("priority: 1", "aliases: [a\0b]", 0, "special characters are not allowed"),
    ],
)
def test_fault_is_named_with_its_place(old, new, line, words):
    """Goal: whoever made the mistake finds it. Method: one change each in a file that is read."""
    read(SMALL)
    with pytest.raises(UsageError) as refused:
        read(SMALL.replace(old, new, 1))
    assert words in refused.value.message
    assert refused.value.details.get("line", 0) in (line, 0)
    if line and "again" not in words:
        assert f"pool.yaml:{line}:" in refused.value.message


def test_arguments_of_an_engine_may_have_several_lines():
    template = "{% for m in messages %}\n\t{{ m }}\n"
    text = SMALL.replace("priority: 1", 'args: [--chat-template, "{}"]', 1)
    escaped = template.replace("\n", "\\n").replace("\t", "\\t")
    assert read(text.replace("{}", escaped, 1)).models["chat"].args[1] == template


def test_queue_of_one_model_is_no_longer_than_the_whole_queue():
    assert read(SMALL.replace("models:", "queue: {max: 10}\nmodels:", 1)).queue.per_model == 10


def test_names_of_devices_replace_their_numbers(tmp_path):
    directory = str(tmp_path)
    with pytest.raises(UsageError, match="none has started"):
        with_served_names(read(EXAMPLE), directory)
    write_device_names(directory, ["GPU-a"])
    with pytest.raises(UsageError, match="it serves 1: GPU-a"):
        with_served_names(read(EXAMPLE), directory)
    write_device_names(directory, ["GPU-b", "GPU-a"])
    twice = read(EXAMPLE.replace("[0, 1]", "[0, GPU-b]", 1))
    with pytest.raises(UsageError, match="0 and GPU-b of the pool file are both GPU-b"):
        with_served_names(twice, directory)
    pool = with_served_names(read(EXAMPLE), directory)
    assert pool.models["batch"].devices == ("GPU-a",)

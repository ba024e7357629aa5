"""The page of `/metrics`: vLLM's names, whatever engine is active and while none is.

An engine's own page goes through. Requests that wait in the gateway are added to its
`vllm:num_requests_waiting`, and the three gauges that endpoint pickers read are written here where
the engine does not say them. The pages of several engines become one, since Prometheus's format has
each name once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from msgspec import Struct

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
RUNNING = b"vllm:num_requests_running"
WAITING = b"vllm:num_requests_waiting"
KV_USAGE = b"vllm:kv_cache_usage_perc"
HELP = {
    RUNNING: b"Number of requests in model execution batches.",
    WAITING: b"Number of requests waiting to be processed.",
    KV_USAGE: b"KV-cache usage. 1 means 100 percent usage.",
}
_START = b"# HELP "
_SAMPLE = re.compile(rb"^([^#\s{]+\{[^\n]*\}) (\S+)", re.MULTILINE)


class RequestLoad(Struct, frozen=True):
    """What the gateway knows of one model. `kv_usage`: what its engine has said last."""

    model: str
    running: int = 0  # requests that an engine has
    waiting: int = 0
    kv_usage: float = 0.0


def page_of(found: Iterable[tuple[RequestLoad, bytes]], *, is_pool: bool) -> bytes:
    """One page out of those of all active engines, b"" where one has none."""
    merged: dict[bytes, bytes] = {}
    for load, page in found:
        for name, block in _with(load, page).items():
            # Numbers of a process name no model: those of two engines could not be told apart.
            if is_pool and not name.startswith(b"vllm:"):
                continue
            known = merged.get(name)
            merged[name] = block if known is None else known + _samples(block)
    return b"".join(merged.values())


def kv_usage(page: bytes) -> float | None:
    """The largest of an engine's caches; None: it does not say."""
    block = _blocks(page).get(KV_USAGE, b"")
    return max((float(value) for _, value in _SAMPLE.findall(block)), default=None)


def _with(load: RequestLoad, page: bytes) -> dict[bytes, bytes]:
    blocks = _blocks(page)
    own = {RUNNING: load.running, WAITING: load.waiting, KV_USAGE: load.kv_usage}
    labels = b'{engine="0",model_name="%b"}' % _escaped(load.model)
    if load.waiting and WAITING in blocks:
        blocks[WAITING] = _SAMPLE.sub(
            lambda sample: b"%b %.1f" % (sample[1], float(sample[2]) + load.waiting),
            blocks[WAITING],
            count=1,
        )
    for name, value in own.items():
        if name not in blocks:
            head = b"# HELP %b %b\n# TYPE %b gauge\n" % (name, HELP[name], name)
            blocks[name] = b"%b%b%b %s\n" % (head, name, labels, repr(float(value)).encode())
    return blocks


def _blocks(page: bytes) -> dict[bytes, bytes]:
    """By name: its comments and samples."""
    if not page.startswith(_START):
        return {}
    parts = page.removesuffix(b"\n").removeprefix(_START).split(b"\n" + _START)
    return {part.partition(b" ")[0]: b"%b%b\n" % (_START, part) for part in parts}


def _samples(block: bytes) -> bytes:
    lines = block.splitlines(keepends=True)
    return b"".join(line for line in lines if not line.startswith(b"#"))


def _escaped(label: str) -> bytes:
    return label.translate({92: r"\\", 34: r"\"", 10: r"\n"}).encode()

"""`understudy support-bundle`: diagnostics in one file.

Decides what goes in and how much of it. Each source is collected separately: if it fails or hangs,
its entry is missing, and `contents.txt` says why. So it works with any part of the pod down; what
the parts wrote last is in their state files. Secrets and prompts are removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import io
import os
import platform
import re
import shlex
import stat
import sys
import tarfile
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from plumbing.errors import UnderstudyError, UsageError
from plumbing.service import procfs
from plumbing.service.metrics import build_info
from plumbing.text import one_line, size, table, to_json
from understudy.doctor import ExaminedPod, examine, look
from understudy.host import machine, read
from understudy.schema import DoctorDocument
from understudy.status.gather import gather, past_events

Say = Callable[[str], None]

STDOUT = Path("-")

COMMAND_S = 15.0  # a part may hang: that is a reason for a bundle
LOG_TAIL_BYTES = 1 << 20  # ten thousand lines per container: hours, or a crash loop
FILE_BYTES_MAX = 256 << 10  # state files have a few KiB, the journal of a large model more
FILES_MAX = 128  # of one kind; a pod has a dozen, plus stale ones
ENTRY_BYTES_MAX = 4 << 20  # of other entries: a thousand events of ten parts
BUNDLE_BYTES_MAX = 32 << 20  # before compression: the result fits mail and issue trackers


class Bundle:
    """The entries, up to `BUNDLE_BYTES_MAX`, and the reasons for missing ones."""

    def __init__(self) -> None:
        self.entries: dict[str, bytes] = {}
        self.missing: dict[str, str] = {}

    def add(self, name: str, content: str, bytes_max: int = ENTRY_BYTES_MAX) -> None:
        """Add `content`; if it is too long, its end: the latest matters most."""
        raw = redacted(content).encode(errors="replace")
        if len(raw) > bytes_max:
            raw = b"(truncated at the beginning)\n" + raw[-bytes_max:]
        if self.size_bytes + len(raw) > BUNDLE_BYTES_MAX:
            self.missing[name] = f"the bundle has reached its limit of {size(BUNDLE_BYTES_MAX)}"
            return
        self.entries[name] = raw

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.entries.values()))

    def contents(self) -> list[str]:
        """What is in it and what is missing, as lines."""
        rows = [(name, size(len(raw))) for name, raw in sorted(self.entries.items())]
        missing = (f"missing: {name}: {why}" for name, why in self.missing.items())
        return [one_line(line) for line in (*table(rows), *missing)]


async def collect(directory: Path, log_dir: Path, output: Path | None, say: Say) -> Path:
    """Write a bundle of the pod in `directory` to `output`, or to a new file in the current
    directory; `say` gets its contents and its path.

    Raises:
        UsageError: `bundle.not_written`.
    """
    name = f"understudy-support-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    path = output or Path.cwd() / f"{name}.tar.gz"
    file = _create(path)
    try:
        with file:
            bundle = await _gather(directory, log_dir)
            contents = bundle.contents()
            bundle.entries["contents.txt"] = "".join(f"{line}\n" for line in contents).encode()
            _write(file, name, bundle.entries)
    except BaseException:
        if path != STDOUT:
            path.unlink(missing_ok=True)  # do not leave half a bundle
        raise
    for line in contents:
        say(line)
    written = "written" if path == STDOUT else f"{path}  {size(path.stat().st_size)}"
    say(f"{written}; review it before you share it")
    return path


async def _gather(directory: Path, log_dir: Path) -> Bundle:
    bundle = Bundle()
    pod: ExaminedPod | None = None

    async def entry(name: str, asked: Coroutine[Any, Any, Any]) -> None:
        try:
            async with asyncio.timeout(COMMAND_S):
                found = await asked
            bundle.add(name, found if isinstance(found, str) else to_json(found, indent=1))
        except TimeoutError:
            bundle.missing[name] = f"timed out after {COMMAND_S:g} s"
        except (UnderstudyError, OSError) as error:
            bundle.missing[name] = str(error)

    async def doctor() -> DoctorDocument:
        nonlocal pod
        pod = await look(directory, os.environ)
        return examine(pod)

    # At the same time: a part that hangs is waited for by each that asks it.
    await asyncio.gather(
        entry("status.json", gather(directory)),
        entry("events.jsonl", _events(directory)),
        entry("doctor.json", doctor()),
    )
    if pod is not None and pod.pool_path:
        with contextlib.suppress(OSError):  # then doctor says why
            bundle.add("pool-file.yaml", _tail(Path(pod.pool_path), FILE_BYTES_MAX))
    bundle.add("machine.json", to_json(machine_facts(), indent=1))
    processes = process_facts(pod.pids if pod is not None else ())
    bundle.add("processes.json", to_json(processes, indent=1))
    _add_files(bundle, "state", directory, "*.json*", FILE_BYTES_MAX)
    _add_files(bundle, "log", log_dir, "*.log*", LOG_TAIL_BYTES)
    if not any(name.startswith("log/") for name in (*bundle.entries, *bundle.missing)):
        found = bundle.missing.get("log", f"no logs in {log_dir}")
        bundle.missing["log"] = f"{found}; pass their directory with --log-dir"
    return bundle


async def _events(directory: Path) -> str:
    found = await asyncio.to_thread(past_events, directory)
    return "".join(f"{to_json(each)}\n" for each in found)


def _add_files(bundle: Bundle, kind: str, folder: Path, pattern: str, bytes_max: int) -> None:
    """Add the end of each matching file; the folder may be missing or not readable."""
    try:
        names = fnmatch.filter(sorted(os.listdir(folder)), pattern)
    except OSError as error:
        bundle.missing[kind] = str(error)
        return
    for name in names[:FILES_MAX]:
        entry = f"{kind}/{one_line(name)}"
        try:
            bundle.add(entry, _tail(folder / name, bytes_max), bytes_max)
        except OSError as error:
            bundle.missing[entry] = str(error)


def _tail(path: Path, bytes_max: int) -> str:
    """The last `bytes_max` bytes of a regular file; opening a pipe must not block."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{path} is not a regular file")
        skipped = file.seek(max(0, found.st_size - bytes_max))
        raw = file.read(bytes_max)
    # Half a line may be a secret without its name, so it is dropped.
    _, _, whole_lines = raw.partition(b"\n")
    return (whole_lines if skipped and whole_lines else raw).decode(errors="replace")


def _create(path: Path) -> io.BufferedWriter:
    """Create the file, private, before anything is collected."""
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return open(os.dup(1) if path == STDOUT else os.open(path, flags, 0o600), "wb")
    except OSError as error:
        raise UsageError(
            "bundle.not_written",
            f"cannot write {path}: {error.strerror}; choose another file with --output, or - for "
            "standard output",
        ) from error


def _write(file: io.BufferedWriter, folder: str, entries: dict[str, bytes]) -> None:
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, raw in sorted(entries.items()):
            about = tarfile.TarInfo(f"{folder}/{name}")
            about.size, about.mode, about.mtime = len(raw), 0o600, int(time.time())
            archive.addfile(about, io.BytesIO(raw))


# --- the machine and the pod's processes: versions, limits, /proc; secrets are redacted

PROCESSES_MAX = 256  # a pod of eight ranks and two engines has some fifty
MACHINE_FILES = (
    *("/proc/version", "/proc/meminfo", "/proc/loadavg", "/proc/uptime", "/proc/self/mountinfo"),
    *("/proc/pressure/memory", "/proc/pressure/cpu", "/proc/sys/fs/file-nr", "/etc/os-release"),
    *("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/cpu.stat"),
)
PROCESS_FILES = ("status", "limits", "cgroup", "oom_score", "oom_score_adj", "wchan", "sched")


def machine_facts() -> dict[str, Any]:
    """Versions, kernel, memory, limits, and this command's environment."""
    return {
        "build": build_info(),
        "machine": machine(),
        "uname": platform.uname()._asdict(),
        "python": sys.version,
        "executable": sys.executable,
        "uid": os.geteuid(),
        "packages": {each.name: each.version for each in metadata.distributions()},
        "environment": redacted_environment(os.environ),
        "files": {path: found for path in MACHINE_FILES if (found := read(path))},
    }


def process_facts(pids: Collection[int]) -> list[dict[str, Any]]:
    """What /proc has of each process; one that exits meanwhile is left out."""
    found = []
    for pid in sorted(pids)[:PROCESSES_MAX]:
        words = read(f"/proc/{pid}/cmdline").rstrip("\0").split("\0")
        if not procfs.is_alive(pid):
            continue
        variables = (pair.partition("=") for pair in read(f"/proc/{pid}/environ").split("\0"))
        found.append(
            {
                "pid": pid,
                "name": procfs.name(pid),
                "parent": procfs.parent(pid),
                "command": redacted(shlex.join(words)),
                "environment": redacted_environment({name: value for name, _, value in variables}),
                "rss_bytes": procfs.rss_bytes(pid),
                "descriptors": len(procfs.fds(pid)),
                "files": {name: read(f"/proc/{pid}/{name}") for name in PROCESS_FILES},
            }
        )
    return found


# --- without secrets and prompts
#
# Environment values are kept by an allow-list, minus names that look like secrets, because no list
# of secrets is complete. In text (logs, command lines) anything that looks like a secret or a
# prompt is replaced by a marker.

NOT_KEPT = "(not kept)"

# Settings that explain a pod's behaviour. Of all others only the name is kept.
_KNOWN = re.compile(
    r"UNDERSTUDY_|ENGINE_|GMS_|LOCKSERVER_|LOG_|CUDA_|NVIDIA_|NCCL_|VLLM_|TORCH|PYTORCH_|OMP_|MKL_"
    r"|OPENBLAS_|MALLOC_|LD_|PYTHON|(PATH|HOME|TMPDIR|TZ|LANG|HOSTNAME|POD_NAME|NODE_NAME)$"
)
_SECRET_NAME = re.compile(
    r"(?i)token(?!s|iz)|(^|[_-])key|apikey|secret|passw|passphrase|(^|[_-])pwd|credential|auth|cookie|private|signature"
)

# A secret in text, by its name. Our own tokens are numbers and stay: they are needed for diagnosis.
# Every repetition is bounded: a log may hold a megabyte of anything.
_SECRETS = r"""(?: api[_-]?key | access[_-]?key | private[_-]?key | secret | passw(?:or)?d
    | passphrase | credentials? | signature )"""
_TOKEN = r"(?: token (?! s\b | iz | \w{0,64}_ids ) )"
_IS = r"""\\{0,8}["']? \s{0,8} [:=] \s{0,8}"""  # quotes of JSON in JSON are escaped
# A list, a quoted string (with plain or escaped quotes), or a word; its beginning is a group.
_VALUE = r"""(?: (\[) [^\]\n]{0,4096} | (?: bearer \s{1,8} )? (?:
    (") (?:[^"\\\n]|\\.){0,4096} | (') (?:[^'\\\n]|\\.){0,4096}
    | (\\{1,8}["']) (?:[^"'\\\n]|\\{1,8}[^"'\\\n]){0,4096}
    | [^\s"'\\,;}\]&]+ ) )"""
_NAMED_IN_TEXT = re.compile(
    rf"""(?ix)
    ( (?: {_SECRETS} | {_TOKEN} (?! [\w-]{{0,64}} {_IS} \d+\b) ) [\w-]{{0,64}} {_IS} )
    (?! (?: null | none | true | false ) \b | \( | ["']{{2}} )
    {_VALUE}
    """
)
# A flag and its value: behind a space, in a list behind a comma, or on the next line behind a dash.
_FLAG_IN_TEXT = re.compile(
    rf"""(?ix) ( (?<![\w-]) --? (?: [\w-]{{1,64}} [_-] )? (?: {_SECRETS} | {_TOKEN} | key ) ["']?
    (?: [ ]{{1,8}} | [ \t]{{0,64}} (?: , \s{{0,64}} | \n [ \t]{{0,64}} - [ \t]{{1,64}} ) ) ["']? )
    (?! - ) \S+"""
)
# Whole headers: everything after the scheme is secret.
_HEADER = re.compile(
    rf"(?ix) \b ( (?: proxy- )? authorization | (?: set- )? cookie ) ( {_IS} \[? \\{{0,8}}[\"']?"
    r"(?: (?:bearer|basic|digest|negotiate|token) \s{1,8} )? ) "
    r"""(?! null\b | none\b | true\b | false\b ) [^\s"'\\\]}][^"'\\\n\r]{0,4096}"""
)
_IN_URL = re.compile(r"""(?i)([?&](?:\w{1,32}[_-])?(?:sig|key|code|auth)=)(?!\(not)[^&\s"'\\]+""")
_SHAPED = re.compile(
    r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|nvapi-|xox[a-z]-|AKIA|ASIA|AIza|eyJ)[\w.-]{12,}"
    r"""|(?<=://)[^/?\#\s"'<>\\]{1,512}(?=@)"""
    r"|(?<=PRIVATE\ KEY-----)(?:(?!-----)[\s\S]){1,16384}"
)
_BEARER = re.compile(r"(?i)\bbearer\s+[\w.~+/=-]{8,}")

# Names of a request's text in the logs of vLLM and others: the rest of the line is dropped.
_PROMPT = re.compile(
    r"""(?i)\b(prompts?|prompt_token_ids|messages|content|input_ids|text)"""
    r"""(\\{0,8}["']?\s*[:=]\s*)\\{0,8}["'\[{(].*"""
)


def redacted_environment(values: Mapping[str, str]) -> dict[str, str]:
    """The environment sorted by name; only known, harmless values are kept."""
    return {
        name: redacted(value) if _KNOWN.match(name) and not _SECRET_NAME.search(name) else NOT_KEPT
        for name, value in sorted(values.items())
    }


def redacted(value: str) -> str:
    """`value` without anything that looks like a secret or a prompt."""
    found = _PROMPT.sub(rf"\1\2{NOT_KEPT}", value)
    found = _HEADER.sub(rf"\1\2{NOT_KEPT}", found)
    found = _NAMED_IN_TEXT.sub(rf"\1\2\3\4\5{NOT_KEPT}", found)
    found = _FLAG_IN_TEXT.sub(rf"\1{NOT_KEPT}", found)
    found = _IN_URL.sub(rf"\1{NOT_KEPT}", found)
    found = _BEARER.sub(f"Bearer {NOT_KEPT}", found)
    return _SHAPED.sub(NOT_KEPT, found)

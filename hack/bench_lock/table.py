"""A report of `bench_lock` as Markdown for the documentation and as text for a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROWS = {
    "unix": "this server, Unix socket",
    "tcp": "this server, TCP: the lease runs out",
    "flock": "`flock`, blocking",
    "flock_poll_100ms": "`flock`, polled every 100 ms",
    "redis": "Redis, `SET NX PX`",
    "etcd": "etcd, lease lock",
    "unix_disk": "Unix socket, state on disk",
    "unix_python": "Unix socket, the holder is Python (11 MiB)",
    "unix_supervisor": "Unix socket, the product's own client",
    "unix_tree": "Unix socket, supervisor with two processes",
    "unix_handback": "Unix socket, backend killed, supervisor releases",
    "tcp_handback": "TCP, backend killed, supervisor releases",
    "flock_python": "`flock`, blocking, the holder is Python",
    "unix_loader": "this server, plain lock `loader`",
}

BEGIN, END = "<!-- tables -->\n", "<!-- end of tables -->"

Row = list[str]


def markdown(report: dict[str, Any]) -> str:
    """The tables of docs/benchmarks.md."""
    about = report["machine"]
    memory_gib = about["memory_bytes"] / 2**30
    lines = [
        f"{about['cpus']} CPUs ({about['cpu']}), {memory_gib:.0f} GiB, Linux {about['kernel']},"
        f" Python {about['python']}; {report['measured'][:10]}.",
        "",
    ]
    for title, rows in tables(report):
        head, *body = rows
        lines += [f"**{title}**", "", _line(head), _line(["---"] + ["---:"] * (len(head) - 1))]
        lines += [*map(_line, body), ""]
    lines += [f"Skipped: {name}: {why}." for name, why in report["skipped"].items()]
    return "\n".join(lines).rstrip()


def put_into(path: str, tables: str) -> None:
    """Replace the text between the marks of the page at `path`.

    Raises:
        ValueError: it has no such marks.
    """
    page = Path(path).read_text()
    start, end = page.index(BEGIN) + len(BEGIN), page.index(END)
    Path(path).write_text(f"{page[:start]}{tables}\n{page[end:]}")


def text(report: dict[str, Any]) -> str:
    """The same for a terminal."""
    about = report["machine"]
    lines = [f"on {about['cpus']} CPUs ({about['cpu']}), load {about['load_1min']:.1f}", ""]
    for title, rows in tables(report):
        widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
        lines.append(title)
        for row in rows:
            cells = [row[0].ljust(widths[0])]
            cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
            lines.append("  " + "  ".join(cells))
        lines.append("")
    lines += [f"skipped: {name}: {why}" for name, why in report["skipped"].items()]
    return "\n".join(lines).rstrip()


def tables(report: dict[str, Any]) -> list[tuple[str, list[Row]]]:
    """Each table as its title and its rows; the first row is the head."""
    found = [("SIGKILL of the holder → the next waiter runs (ms)", _race(report))]
    if "free_lock" in report:
        found.append(("A lock that nobody else wants", _free(report["free_lock"])))
        if report["crowd"] is not None:
            found.append(("Very many waiters", _crowd(report["crowd"])))
        found.append(("Servers", _servers(report["start"])))
    return found


def _race(report: dict[str, Any]) -> list[Row]:
    rows = [["", "p50", "p99", "max", "p50 over unix", "kills"]]
    ratios = report["times_slower_than_unix"]
    both = {**report["kill_to_grant_ms"], **report["kill_to_grant_variants_ms"]}
    for name, values in both.items():
        ratio = _times(ratios[name]["p50"]) if name in ratios else ""
        kills = str(report["kills"].get(name, 0))
        rows.append([ROWS[name], *_cells(values), ratio, kills])
    return rows


def _free(found: dict[str, Any]) -> list[Row]:
    rows = [["", "acquire p50 (ms)", "p99", "max", "durable write p50", "per second"]]
    for name, values in found["acquire_ms"].items():
        write = found["durable_write_ms"].get(name)
        rate = found["acquire_and_release_per_s"][name]
        last = [f"{write['p50']:.3f}" if write else "", f"{rate:,}" if rate else "-"]
        rows.append([ROWS[name], *_cells(values, "{:.3f}"), *last])
    return rows


def _crowd(found: dict[str, Any]) -> list[Row]:
    queued = f"{found['queued']:,} of {found['asked']:,}"
    if found["refused_with"]:
        queued += f" (then `{found['refused_with']}`)"
    spread = " / ".join(_cells(found["kill_to_grant_ms"]))
    return [
        ["", "figure"],
        ["queued waiters", queued],
        ["time to queue them (s)", f"{found['time_to_queue_s']:g}"],
        ["kill → granted before them, p50 / p99 / max (ms)", spread],
        ["the server's memory, alone → with them (MiB)",
         f"{found['server_idle_mib']} → {found['server_crowded_mib']}"],
    ]  # fmt: skip


def _servers(found: dict[str, Any]) -> list[Row]:
    rows = [["", "start → first grant, p50 (ms)", "p99", "max", "memory idle (MiB)"]]
    for name, values in found["to_first_grant_ms"].items():
        rows.append([ROWS[name], *_cells(values, "{:.0f}"), f"{found['server_mib'][name]}"])
    return rows


def _cells(values: dict[str, float] | None, form: str = "{:,.2f}") -> Row:
    if values is None:
        return ["-", "-", "-"]
    return [form.format(values[key]) for key in ("p50", "p99", "max")]


def _times(ratio: float) -> str:
    return f"{ratio:,.0f} ×" if ratio >= 10 else f"{ratio:.1f} ×"


def _line(cells: Row) -> str:
    return f"| {' | '.join(cells)} |"

"""`make device-check`: check on one GPU what the design relies on, and write a report.

    python -m hack.device_check [--device UUID] [--only PART,…] [--out FILE] [--stand-in]

Each part has its own limit, and its findings go to bench/device/<device>-<date>.json. Then
`make device-check` runs the tests of the memory service on the real driver. Only plain allocations
are made and no setting is changed; 4 GiB of the device stay free. Without a GPU it prints so and
writes nothing. `--stand-in` rehearses everything on the tests' stand-in for the driver; the report
is marked, and never written to bench/device. The stand-in belongs to the tests, which nothing here
imports: it is a program that is run (`python -m tests.standin.build`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

GIB = 1 << 30
ROOT = Path(__file__).resolve().parent.parent  # hack.rig imports what may be missing
BENCH = ROOT / "bench" / "device"
SCHEMA = 1
FIRST = "device"
STAND_IN_ENV = "STANDIN_MACHINE"  # is set where the stand-in is
BUDGET_S = 480.0  # for everything
PART_S_MIN = 8.0  # no part finds anything in less
STILL_S = 0.3  # how long memory in use must not change to count
REAL = {"max_gib": 80.0, "max_kills": 100, "still_s": STILL_S}
# Two cores and no GPU: the same calls with small sizes; free memory is free at once.
STAND_IN = {"max_gib": 1.0, "max_kills": 2, "still_s": 0.02}


def main() -> int:
    flags = _flags()
    from hack.device.part import find_devices
    from hack.device.parts import PARTS

    names = [name for name in flags.only.split(",") if name] or [*PARTS]
    names = list(dict.fromkeys([FIRST, *names]))  # names the device in the report
    if unknown := set(names) - {*PARTS}:
        print(f"unknown parts: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
        return 2
    if flags.stand_in and STAND_IN_ENV not in os.environ:
        # A process finds libraries by the environment that it begins with.
        words = [sys.executable, "-m", "hack.device_check", *sys.argv[1:]]
        os.execve(sys.executable, words, {**os.environ, **_stand_in()})
    devices, reason = find_devices([flags.device], str(ROOT))
    if not devices:
        print(f"device check: no GPU can be used here ({reason}); skipped {', '.join(names)}")
        return 0
    os.environ["CUDA_VISIBLE_DEVICES"] = devices[0]
    report = _ask(names, devices[0], flags)
    _finish(report, flags)
    has_failed = any(part["status"] == "failed" for part in report["parts"].values())
    return 1 if has_failed or not all(report["claims"].values()) else 0


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="check on a GPU what the design relies on")
    parser.add_argument("--device", default="", help="its UUID; default: the first one visible")
    parser.add_argument(
        "--only", default="", help="only these parts, with commas; writes with --out only"
    )
    parser.add_argument("--out", type=Path, help="instead of bench/device/<device>-<date>.json")
    parser.add_argument("--stand-in", action="store_true", help="rehearse without a GPU")
    flags = parser.parse_args()
    return argparse.Namespace(**vars(flags), **(STAND_IN if flags.stand_in else REAL))


def _stand_in() -> dict[str, str]:
    """The environment in which processes get the tests' stand-in for the driver."""
    command = [sys.executable, "-m", "tests.standin.build"]
    built = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    environment: dict[str, str] = json.loads(built.stdout)
    return environment


def _ask(names: list[str], device: str, flags: argparse.Namespace) -> dict[str, Any]:
    """Every part in turn; the last one gets what is left of the budget."""
    from hack.device.parts import PARTS, question
    from hack.rig import commit, machine
    from plumbing.service.process import raise_fd_limit

    began = time.monotonic()
    end = began + BUDGET_S
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "date": time.strftime("%Y-%m-%d"),
        "is_stand_in": flags.stand_in,
        "commit": commit(),
        "machine": machine(),
        "parts": {},
    }
    raise_fd_limit()
    for name in names:
        started = time.monotonic()
        print(f"{name} ...", file=sys.stderr, flush=True)
        limit_s = min(PARTS[name][1], end - started)
        found = {"question": question(name), **_run_part(name, device, limit_s, flags)}
        report["parts"][name] = {**found, "seconds": round(time.monotonic() - started, 1)}
    report["seconds"] = round(time.monotonic() - began, 1)
    report["claims"] = {
        claim: holds
        for part in report["parts"].values()
        for claim, holds in part.get("claims", {}).items()
    }
    return report


def _run_part(name: str, device: str, limit_s: float, flags: argparse.Namespace) -> dict[str, Any]:
    """What one part found, however it ended. It keeps its limit itself, and waits for no peer for
    longer than a minute."""
    from hack.device.part import Part, Skipped
    from hack.device.parts import PARTS

    if limit_s < PART_S_MIN:
        return {"status": "skipped", "reason": "out of time"}
    found: dict[str, Any] = {"status": "ok", "reason": None}
    with tempfile.TemporaryDirectory(prefix="dc-") as directory:
        part = Part(
            device=device,
            directory=directory,
            limit_s=limit_s,
            bytes_max=int(flags.max_gib * GIB),
            kills_max=flags.max_kills,
            still_s=flags.still_s,
        )
        try:
            PARTS[name][0](part)
        except Skipped as error:
            found = {"status": "skipped", "reason": str(error)}
        except Exception as error:  # whatever a driver makes of it: the other parts go on
            found = {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
        finally:
            part.close()
    return {**found, "figures": part.figures, "claims": part.claims}


def _finish(report: dict[str, Any], flags: argparse.Namespace) -> None:
    """Print a summary, and write the report unless this was a rehearsal or only some parts."""
    for name, part in report["parts"].items():
        print(f"{name}: {part['status']}, {part['seconds']} s. {part['question']}")
        if part["reason"]:
            print(f"    {part['reason']}")
        for line in _lines(part.get("figures", {})):
            print(f"    {line}")
    for claim, holds in report["claims"].items():
        print(f"{'holds        ' if holds else 'DOES NOT HOLD'}  {claim}")
    name = report["parts"][FIRST].get("figures", {}).get("name")
    # Also if the stand-in came with the environment.
    report["is_stand_in"] |= name is not None and name.startswith("Stand-in")
    path = flags.out
    if path is None and not flags.only and name is not None:
        path = BENCH / f"{name.lower().replace(' ', '-')}-{report['date']}.json"
    if path is None:
        print("nothing was written: no --out, and only some parts or no name of the device")
        return
    if report["is_stand_in"] and path.resolve().is_relative_to(BENCH):
        print("nothing was written: this was the stand-in")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {path}")


def _lines(found: Any, name: str = "", depth: int = 0) -> Iterator[str]:
    if isinstance(found, dict) and depth < 2:
        for key, value in found.items():
            yield from _lines(value, f"{name}.{key}" if name else key, depth + 1)
    else:
        words = json.dumps(found)
        yield f"{name:<44} {words if len(words) <= 120 else words[:117] + '...'}"


if __name__ == "__main__":
    sys.exit(main())

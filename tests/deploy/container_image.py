"""Builds the CPU image without a registry, on a base that it makes itself: for CI and the tests.

    python -m tests.deploy.container_image            # as root, with podman, runc and debootstrap

The base is Debian with Python, made once by debootstrap and kept as an image. Packages are
downloaded here, with this Python's pip and its configuration, and passed on as a folder: the build
itself has no network, and no configuration gets into an image or a file.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONTAINERFILE = ROOT / "deploy/container/Containerfile.cpu"

IMAGE = "localhost/understudy:ci"
RELEASE = "bookworm"
# The test of the units needs systemd as PID 1.
PACKAGES = ("python3", "python3-venv", "systemd")
BASE = f"localhost/understudy-base:{RELEASE}-{'-'.join(PACKAGES)}"
BASE_PYTHON = "3.11"  # of that release; packages are fetched for it, whatever Python runs this
MIRROR = "http://deb.debian.org/debian"
WHEELS = "/wheels"  # where the build finds the folder of packages

TOOLS = ("podman", "runc", "debootstrap")
# runc and cgroupfs also work where systemd is not PID 1.
PODMAN = ("podman", "--runtime=runc", "--cgroup-manager=cgroupfs")
STEP_DEADLINE_S = 900.0  # the slowest step, debootstrap over a slow line, takes minutes


def why_not() -> str | None:
    """What this machine lacks for building and running containers; None if nothing."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)} (Debian's packages of that name)"
    return None if os.geteuid() == 0 else "needs root"


def build(image: str = IMAGE, mirror: str = MIRROR) -> str:
    """Build the image from this working tree; returns its id. Unchanged layers are reused."""
    with tempfile.TemporaryDirectory(prefix="understudy-image-") as place:
        if _run(*PODMAN, "image", "exists", BASE, is_question=True).returncode:
            _make_base(Path(place), mirror)
        wheels = Path(place, "wheels")
        _fetch_packages(wheels)
        _run(
            *PODMAN, "build", f"--file={CONTAINERFILE}", f"--tag={image}",
            f"--build-arg=BASE={BASE}", f"--build-arg=PIP_FIND_LINKS={WHEELS}",
            "--build-arg=PIP_NO_INDEX=1", f"--volume={wheels}:{WHEELS}:ro",
            "--network=none", "--pull=never", str(ROOT),
        )  # fmt: skip
    return _run(*PODMAN, "image", "inspect", "--format={{.Id}}", image).stdout.strip()


def _make_base(place: Path, mirror: str) -> None:
    root = place / "root"
    include = f"--include={','.join(PACKAGES)}"
    _run("debootstrap", "--variant=minbase", include, RELEASE, str(root), mirror)
    # Nothing more will be installed.
    for folder in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man"):
        shutil.rmtree(root / folder, ignore_errors=True)
    archive = place / "base.tar"
    _run("tar", "--create", f"--directory={root}", f"--file={archive}", ".")
    _run(*PODMAN, "import", str(archive), BASE)


def _fetch_packages(folder: Path) -> None:
    """Download what the image gets from an index, and what its wheel is built with.

    Raises:
        RuntimeError: pip got none. It names a package that has no version, and not what is missing.
    """
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, build = document["project"], document["build-system"]["requires"]
    wanted = [*project["dependencies"], *build, "wheel"]
    try:
        _run(
            sys.executable, "-m", "pip", "download", "--quiet", f"--dest={folder}",
            "--only-binary=:all:", f"--python-version={BASE_PYTHON}", *wanted,
        )  # fmt: skip
    except RuntimeError as error:
        raise RuntimeError(
            "the image needs packages from an index that pip can reach from here: set PIP_INDEX_URL"
            f" (pypi.org by default), or PIP_FIND_LINKS to a folder: {error}"
        ) from error


def _run(*command: str, is_question: bool = False) -> subprocess.CompletedProcess[str]:
    """Run `command`; raises with its output if it failed, unless failing is an answer."""
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=STEP_DEADLINE_S
    )
    if done.returncode and not is_question:
        raise RuntimeError(
            f"{' '.join(command[:6])} … ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        )
    return done


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.deploy.container_image")
    parser.add_argument("--image", default=IMAGE, help=f"its name (default {IMAGE})")
    parser.add_argument("--mirror", default=MIRROR, help=f"Debian's (default {MIRROR})")
    given = parser.parse_args(arguments)
    lack = why_not()
    if lack is not None:
        sys.exit(f"error: this machine cannot build the image: {lack}")
    print(build(given.image, given.mirror))


if __name__ == "__main__":
    main()

"""The container image that the tests run, made by `python -m tests.deploy.container_image`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("podman", "runc", "debootstrap")
# runc and cgroupfs also work where systemd is not PID 1.
PODMAN = ("podman", "--runtime=runc", "--cgroup-manager=cgroupfs")
WHEELS = "/wheels"  # where the build gets its packages


def why_not() -> str | None:
    """What this machine lacks for building and running containers; None if nothing."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)} (Debian's packages of that name)"
    return None if os.geteuid() == 0 else "needs root"


def build() -> str:
    """Build the image from this working tree; its id."""
    command = [sys.executable, "-m", "tests.deploy.container_image"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()

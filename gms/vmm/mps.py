"""NVIDIA's Multi-Process Service: whether the processes of this machine share one CUDA context.

With it, a context belongs to the service and not to the process that asked for it: a fault in one
client ends all of them, and what a killed client had launched may go on writing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from plumbing.service import procfs

MPS_PIPE = "CUDA_MPS_PIPE_DIRECTORY"
MPS_DAEMON = "nvidia-cuda-mps"  # prefix of its processes' names


def look_for_mps(environ: Mapping[str, str]) -> str | None:
    """Evidence of the service: its pipe directory is set, or its daemon runs."""
    pipes = environ.get(MPS_PIPE)
    if pipes and os.path.isdir(pipes):
        return f"{MPS_PIPE} is {pipes}"
    daemons = [pid for pid in procfs.pids() if procfs.name(pid).startswith(MPS_DAEMON)]
    return f"pid {daemons[0]} is {procfs.name(daemons[0])}" if daemons else None

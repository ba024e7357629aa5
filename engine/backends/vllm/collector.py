"""No garbage collection while a process of vLLM starts.

To import vLLM makes 700,000 objects, which live as long as the process. The collector visits them
again and again while they are made: a fifth of the time that the imports take, in every process.
And every full collection later would visit them once more, for half a second, so they are set
aside.
"""

from __future__ import annotations

import gc
import multiprocessing

# The processes in which the plugin resumes it; in any other one it must not be paused.
RESUMED_IN = ("EngineCore", "VllmWorker-")


def pause() -> None:
    gc.disable()


def pause_in_spawned() -> None:
    """In a process that vLLM has just spawned."""
    if multiprocessing.current_process().name.startswith(RESUMED_IN):
        pause()


def resume() -> None:
    """From now on objects are collected, but those that exist already."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()

"""The parts of the device check, in the order in which they are asked, and their process.

`python -m hack.device.parts NAME JSON` runs one: a crash, a hang or a lost context costs its answer
only. This process opens no CUDA; its peers do, and they die with it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

from hack.device import death, lifetime, mapping, service
from hack.device.part import Part, Skipped
from understudy.service.fd_limit import raise_fd_limit
from understudy.service.parent import arm_from_environment


@dataclass(frozen=True)
class Question:
    """A part: what runs, and for how long it may."""

    run: Callable[[Part], None]
    limit_s: float

    @property
    def text(self) -> str:
        """The question, as people read it: the first line of the function's docstring."""
        return (self.run.__doc__ or "").partition("\n")[0]


# What everything rests on comes first: what the budget leaves no time for is skipped.
PARTS = {
    "device": Question(lifetime.device, 30),
    "context": Question(lifetime.context, 40),
    "read_only": Question(mapping.read_only, 70),
    "fd_alone": Question(lifetime.fd_alone, 45),
    "hand_back": Question(lifetime.hand_back, 30),
    "refcount": Question(lifetime.refcount, 40),
    "whole_maps": Question(mapping.whole_maps, 30),
    "server": Question(service.server, 45),
    "crash": Question(service.crash, 60),
    "costs": Question(mapping.costs, 50),
    "attach": Question(service.attach, 70),
    "death": Question(death.death, 100),
    "alias": Question(mapping.alias, 30),
    "speed": Question(mapping.speed, 30),
}


def main() -> None:
    arm_from_environment()
    raise_fd_limit()
    part = Part(**json.loads(sys.argv[2]))
    try:
        with part.ending_peers():
            PARTS[sys.argv[1]].run(part)
    except Skipped as error:
        part.finish(status="skipped", reason=str(error))
    except Exception as error:
        part.finish(status="failed", reason=f"{type(error).__name__}: {error}")
        raise
    else:
        part.finish(status="ok", reason=None)
    sys.stdout.flush()
    os._exit(0)  # a thread that watches for what never came must not keep this process


if __name__ == "__main__":
    main()

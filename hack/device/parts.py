"""The parts of the device check, in the order in which they run.

The process that runs them does not open CUDA; its peers do, and they die with it.
"""

from __future__ import annotations

from hack.device import death, driver, fence, service

# Each with its limit in seconds, the most important first: the budget may not suffice for the last.
# The first line of a function's docstring is its question.
PARTS = {
    "device": (driver.device, 30.0),
    "read_only": (driver.read_only, 60.0),
    "descriptors": (driver.descriptors, 60.0),
    "refcount": (driver.refcount, 40.0),
    "server": (service.server, 45.0),
    "fence": (fence.fence, 150.0),
    "death": (death.death, 100.0),
}


def question(name: str) -> str:
    """The question of the part called `name`."""
    return (PARTS[name][0].__doc__ or "").partition("\n")[0]

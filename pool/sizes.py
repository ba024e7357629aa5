"""What a model needs before anybody has measured it: what its file says, else what its files have.

Never guessed from a name. Where nothing tells, the size is unknown, and the model is given the
whole of its devices until its engine has measured.
"""

from __future__ import annotations

import os

from pool.core.states import EngineSizes
from pool.settings import ModelSettings

# Of the files, for all that is not weights: context, graphs, workspaces, KV memory. An engine with
# a large KV cache needs far more, and says so before it takes any.
REST_SHARE = 0.3


def sizes_of(model: ModelSettings) -> EngineSizes | None:
    """By device, for one engine; None: unknown."""
    devices = model.devices
    if model.memory is not None:
        memory = model.memory
        return EngineSizes(
            base=dict.fromkeys(devices, int(memory.base)),
            weights=dict.fromkeys(devices, int(memory.weights)),
            kv=dict.fromkeys(devices, int(memory.kv)),
            is_estimated=True,
        )
    total = _bytes_of_files(model.model)
    if not total:
        return None
    share = -(-total // len(devices))
    return EngineSizes(
        base=dict.fromkeys(devices, int(share * REST_SHARE)),
        weights=dict.fromkeys(devices, share),
        kv=dict.fromkeys(devices, 0),  # in the share of the rest
        is_estimated=True,
    )


def _bytes_of_files(directory: str) -> int:
    try:
        with os.scandir(directory) as found:
            return sum(each.stat().st_size for each in found if each.name.endswith(".safetensors"))
    except OSError:  # a name that the backend resolves, or nothing: its engine will say
        return 0

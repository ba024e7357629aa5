"""The suballocator on the tensor lists of real models, which the bench uses too."""

from __future__ import annotations

from math import prod

import pytest

from gms.core.suballocator import Suballocator
from gms.manifest import TENSORS_MAX
from hack.bench_gms import models

SLABS_IN_A_FRAME = 250


@pytest.mark.parametrize("model", models.models())
def test_list_has_as_many_parameters_as_the_model(model: str):
    """The rows add up to the published number; scales of quantised blocks are no parameters."""
    tensors = models.tensors(model)
    assert len({name for name, _, _ in tensors}) == len(tensors) <= TENSORS_MAX
    parameters = sum(prod(shape) for name, shape, _ in tensors if "scale_inv" not in name)
    assert parameters == models.document(model)["parameters"]


@pytest.mark.parametrize("is_planned", [True, False])
@pytest.mark.parametrize("model", models.models())
def test_real_models_fit_one_frame_of_slabs_and_waste_little(model: str, is_planned: bool):
    """At most 250 slabs; planned, less than half a percent of the weights is lost."""
    sizes = [models.nbytes(tensor) for tensor in models.tensors(model)]
    places = Suballocator(models.GRANULARITY_BYTES, models.DEVICE_BYTES)
    if is_planned:
        places.plan(sum(sizes), max(sizes))
    models.place_all(places, sizes)
    assert len(places.slab_sizes) <= SLABS_IN_A_FRAME
    assert sum(places.slab_sizes) < sum(sizes) * (1.005 if is_planned else 1.1)

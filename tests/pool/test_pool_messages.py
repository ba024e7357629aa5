"""Goal: what arrives on the pool's socket is bounded, and the values of the core travel unchanged.

Method: encode and decode with the catalogue, as both ends of a connection do.
"""

import pytest

from plumbing.errors import ProtocolError
from plumbing.wire.limits import FRAME_BYTES_MAX
from pool import messages as msg
from pool.core.events import ModelDemand, Ticket, TicketKind
from pool.core.states import MODELS_MAX, TICKETS_MAX

ID = "0123456789abcdef"


def travelled(message):
    return msg.CATALOGUE.decode(msg.CATALOGUE.encode(message, 7), 0)


def test_largest_demand_fits_one_frame():
    """Goal: a full queue never costs the gateway its connection. Method: a model with as many
    tickets as one may have, all fields at their longest, and as many other models as there may be
    with one ticket each."""
    long = Ticket(2**63 - 1, 1e18, -1000, 1e18, TicketKind.PARKED)
    full = ModelDemand((long,) * TICKETS_MAX, 2**63 - 1, 2**63 - 1, 1e18, 1e18, 2**63 - 1)
    name = "m" * 22
    models = {f"{name}{n:03d}": ModelDemand((long,)) for n in range(MODELS_MAX - 1)}
    said = msg.DemandMsg(ID, {**models, "full": full})
    assert len(msg.CATALOGUE.encode(said)) < FRAME_BYTES_MAX / 2
    assert travelled(said) == (said, 7)


def test_lease_names_no_file_but_its_own():
    """Goal: its file is `lease_` and its id, which is no path."""
    with pytest.raises(ProtocolError, match="lease"):
        travelled(msg.LeaseMsg("../../etc/passwd", "HOST-0", 1, 0.0))

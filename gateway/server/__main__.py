"""The child of a gateway that serves clients: `python -m gateway.server`."""

from gateway.server.client_listener import HttpDoors
from gateway.server.main import run

run(HttpDoors)

"""The child of a gateway that serves clients: `python -m gateway.server`."""

from gateway.server.client_listener import ClientListener
from gateway.server.main import run

run(ClientListener)

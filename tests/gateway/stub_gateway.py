"""`gateway serve` with `stub_child` in place of the doors; the same flags."""

import sys
from unittest import mock

from gateway.cli import main
from gateway.supervisor import supervisor

if __name__ == "__main__":
    command = (sys.executable, "-m", "tests.gateway.stub_child")
    real = supervisor.GatewaySupervisor
    with mock.patch.object(
        supervisor, "GatewaySupervisor", lambda settings: real(settings, command=command)
    ):
        main()

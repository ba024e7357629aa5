"""A Slurm of one node for a test: its controller, its node's daemon and munge, on free ports.

Owns these three processes and a folder with all their files. Nothing of a Slurm that this machine
may have is used or touched: every command gets this one's configuration.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.helpers import free_port, until

TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol")
UP_DEADLINE_S = 60.0
COMMAND_DEADLINE_S = 30.0
MIB = 1 << 20

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
# Without control groups, which a test must not count on.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1
ReturnToService=2
KillWait=60
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores}
PartitionName=test Nodes={host} Default=YES State=UP
"""


def why_not() -> str | None:
    """What this machine lacks for a Slurm of its own; None if nothing."""
    missing = [tool for tool in TOOLS if shutil.which(tool, path=_path()) is None]
    if missing:
        return f"needs {', '.join(missing)} (Debian's slurm-wlm and munge)"
    return None if os.geteuid() == 0 else "needs root, for a node that runs jobs"


def _path() -> str:
    """Debian has the daemons in /usr/sbin, which not every PATH names."""
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


class Slurm:
    """Started by `start`; `close` ends its daemons and removes its files."""

    def __init__(self) -> None:
        # Short, for sockets; and munge wants no folder above its socket that others may write to.
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/run"))
        self._environment = {**os.environ, "PATH": _path()}
        self._environment["SLURM_CONF"] = str(self.folder / "slurm.conf")
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        self.folder.chmod(0o755)
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        host = socket.gethostname().partition(".")[0]
        values = {
            "host": host,
            "folder": self.folder,
            "controller_port": free_port(),
            "node_port": free_port(),
            "cores": os.cpu_count(),
        }
        (self.folder / "slurm.conf").write_text(CONFIGURATION.format(**values))
        self._start_munge()
        self._daemon("slurmctld", "-D", "-i")
        self._daemon("slurmd", "-D", "-N", host)
        until(self._is_idle, "the node to be idle", UP_DEADLINE_S)

    def _start_munge(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log"}
        files["seed-file"] = "seed"
        flags = [f"--{flag}={self.folder}/munge.{name}" for flag, name in files.items()]
        self._daemon("munged", "--foreground", "--force", "--num-threads=2", *flags)
        until((self.folder / "munge.socket").is_socket, "munge's socket", UP_DEADLINE_S)

    def _daemon(self, *command: str) -> None:
        with open(self.folder / f"{command[0]}.out", "wb") as output:
            self._daemons.append(
                subprocess.Popen(
                    command,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )

    def _is_idle(self) -> bool:
        for daemon in self._daemons:
            assert daemon.poll() is None, f"{daemon.args} has ended:\n{self.logs()}"
        return "State=IDLE" in self.run("scontrol", "show", "nodes", is_question=True)

    def run(
        self, *command: str, env: Mapping[str, str] | None = None, is_question: bool = False
    ) -> str:
        """What a command of Slurm's printed."""
        done = subprocess.run(
            command,
            env={**self._environment, **(env or {})},
            capture_output=True,
            text=True,
            check=False,
            timeout=COMMAND_DEADLINE_S,
        )
        assert is_question or done.returncode == 0, f"{command}: {done.stderr}\n{self.logs()}"
        return done.stdout

    def job(self, number: int) -> dict[str, str]:
        """What the controller knows of a job."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", str(number))))

    def logs(self) -> str:
        """The end of what each daemon wrote."""
        texts = {path.name: path.read_text(errors="replace") for path in self.folder.glob("*.out")}
        return "\n".join(f"----- {name}\n{text[-4000:]}" for name, text in texts.items())

    def close(self) -> None:
        """End the daemons, the last one first, and remove their files."""
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(COMMAND_DEADLINE_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

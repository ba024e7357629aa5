"""Goal: a job of Slurm's is a pod: it starts, fails over, drains when told to, and leaves nothing.

Method: the script that we ship, submitted to Debian's own Slurm: a controller and a node that the
test starts, with munge between them. A small model on host memory, and real signals.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from plumbing.service.procfs import descendants
from tests.deploy.manifests import DEPLOY
from tests.deploy.one_node_slurm import Slurm, why_not
from tests.e2e.pods import make_model
from tests.e2e.processes import Processes, kill, port_flags
from tests.helpers import until
from understudy.drill.killer import Whole, wait_whole
from understudy.status.gather import gather
from understudy.up.models import ONE_THREAD

SCRIPT = DEPLOY / "slurm/understudy.sbatch"
WHOLE_DEADLINE_S = 90.0
STARTED_DEADLINE_S = 60.0
ENDED_DEADLINE_S = 90.0

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]


class Job:
    """One submitted pod."""

    def __init__(self, slurm: Slurm, model: Path, place: Path) -> None:
        self._slurm = slurm
        self.log = place / "job.log"
        environment = {
            **ONE_THREAD,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONDEVMODE": "",
            "TMPDIR": str(place),
        }
        said = slurm.run(
            "sbatch", "--parsable", f"--output={self.log}", str(SCRIPT),
            f"--model={model}", "--device-bytes=256MiB", *port_flags(),
            env=environment,
        )  # fmt: skip
        self.number = int(said)
        self.directory = place / f"understudy-{self.number}"

    def whole(self, after: int = 0) -> Whole:
        """Wait until the pod is, under a newer grant than `after`."""
        try:
            until(self.directory.exists, "the pod's directory", STARTED_DEADLINE_S)
            return asyncio.run(self._whole(after))
        except BaseException:
            print(self.text(), self._slurm.logs())
            raise

    async def _whole(self, after: int) -> Whole:
        async with asyncio.timeout(WHOLE_DEADLINE_S):
            while True:
                found = await wait_whole(self.directory, deadline_s=WHOLE_DEADLINE_S)
                if found.token > after:
                    return found

    def processes(self) -> list[int]:
        """Every process of the pod, `understudy up` first."""
        view = asyncio.run(gather(self.directory))
        # Above each supervisor is its init, and above that `up`.
        (parent,) = {_parent(_parent(part["engine"]["pid"])) for part in view["engines"]}
        return [parent, *descendants(parent)]

    def state(self) -> dict[str, str]:
        return self._slurm.job(self.number)

    def signal(self, *flags: str) -> None:
        self._slurm.run("scancel", *flags, str(self.number))

    def wait(self, *states: str) -> dict[str, str]:
        """Wait until the controller has the job in one of `states`."""
        until(lambda: self.state()["JobState"] in states, f"job {states}", ENDED_DEADLINE_S)
        return self.state()

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


def _parent(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"^PPid:\t(\d+)$", status, re.MULTILINE)[0])


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    found = Slurm()
    try:
        found.start()
        yield found
    finally:
        found.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("slurm") / "model")


@pytest.fixture
def job(slurm: Slurm, model: Path) -> Iterator[Job]:
    """A job whose processes are all gone, and whose directory is, when the test ends."""
    with tempfile.TemporaryDirectory(prefix="job-", dir="/tmp") as place:
        found = Job(slurm, model, Path(place))
        try:
            yield found
        finally:
            print(found.text())
            if found.state()["JobState"] not in ("COMPLETED", "CANCELLED", "FAILED"):
                found.signal()
                found.wait("CANCELLED", "COMPLETED", "FAILED")


def test_job_fails_over_and_drains_when_it_is_told_to(job: Job):
    """Method: SIGKILL to the active supervisor, then the signal that the script's head names."""
    before = job.whole()
    view = asyncio.run(gather(job.directory))
    pids = {part["engine"]["id"]: part["engine"]["pid"] for part in view["engines"]}
    kill(pids[before.engine])
    after = job.whole(after=before.token)
    assert (after.engine, after.standbys) == (*before.standbys, (before.engine,))
    with Processes(job.processes()) as pod:
        job.signal("--batch", "--signal=INT")
        assert job.wait("COMPLETED", "FAILED")["ExitCode"] == "0:0"
        until(lambda: not pod.alive(), "the end of the pod")
    assert not job.directory.exists()
    assert "draining → dead: drained" in job.text()


def test_job_out_of_time_drains_and_goes_back_into_the_queue(job: Job):
    """Method: the signal that --signal asks for, sent as Slurm sends it: to the script alone."""
    job.whole()
    with Processes(job.processes()) as pod:
        job.signal("--batch", "--signal=USR1")
        state = job.wait("PENDING", "COMPLETED", "FAILED")
        assert (state["JobState"], state["Restarts"]) == ("PENDING", "1")
        until(lambda: not pod.alive(), "the end of the pod")
    assert not job.directory.exists()
    assert "draining → dead: drained" in job.text()
    assert "goes back into the queue" in job.text()


def test_cancelled_job_leaves_nothing(job: Job):
    """Method: scancel, which signals every process of the job."""
    job.whole()
    with Processes(job.processes()) as pod:
        job.signal()
        job.wait("CANCELLED")
        until(lambda: not pod.alive(), "the end of the pod")
    until(lambda: not job.directory.exists(), "the directory to be removed")


def test_job_whose_pod_does_not_start_fails_with_the_reason(slurm: Slurm, tmp_path: Path):
    """Method: a model that is not there."""
    job = Job(slurm, tmp_path / "none", tmp_path)
    state = job.wait("FAILED", "COMPLETED")
    assert (state["JobState"], state["ExitCode"]) == ("FAILED", "2:0")
    assert "pod.no_model" in job.text()

"""Goal: two models take turns on one device, and nothing is told before it is safe."""

from pool.core.states import ModelState
from tests.pool.core.pod import MIB, Pod

S = ModelState


def test_a_to_b_to_a():
    pod = Pod(total_bytes=1300 * MIB).start()
    assert (pod.state("a"), pod.state("b")) == (S.COLD, S.COLD)
    pod.ask("a")
    pod.settle()
    assert pod.state("a") is S.AWAKE
    pod.tick(20_000)
    pod.ask("b")
    pod.settle()
    assert (pod.state("a"), pod.state("b")) == (S.WARM, S.AWAKE)
    for _ in range(3):
        pod.tick(20_000)
        pod.ask("a")
        pod.settle()
        assert (pod.state("a"), pod.state("b")) == (S.AWAKE, S.WARM)
        pod.tick(20_000)
        pod.ask("b")
        pod.settle()
        assert (pod.state("a"), pod.state("b")) == (S.WARM, S.AWAKE)

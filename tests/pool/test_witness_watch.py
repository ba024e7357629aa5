"""Goal: whoever asks whether an engine's processes are dead is answered, also after a shortage.

Method: the real watch in a real directory, in a process that cannot open anything for a moment.
"""

import resource

from pool.core.events import EngineDead, PoolEvent
from pool.server.locks import WitnessWatch
from tests.helpers import auntil


async def test_question_that_meets_a_shortage_of_descriptors_is_answered_after_it(tmp_path):
    answers, tries = list[PoolEvent](), list[int]()

    class CountedWatch(WitnessWatch):
        def _try(self) -> None:
            tries.append(len(tries))
            super()._try()

    watch = CountedWatch(str(tmp_path), answers.append)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        watch.ask("m-0", 7)
        await auntil(lambda: tries, "a try")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not answers  # it could not look
    await auntil(lambda: answers, "the answer")
    watch.close()
    assert answers == [EngineDead("m-0", "", 7)]

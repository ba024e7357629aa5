"""Goal: signals are messages in order, and give their default action back afterwards."""

import asyncio
import os
import signal
import sys
import textwrap

import uvloop

from plumbing.service.signals import SignalInbox


def test_signals_arrive_in_order_and_none_is_merged():
    """Goal: a second SIGTERM is a second message; method: three real signals to this process."""

    async def main():
        inbox = SignalInbox(signals=(signal.SIGTERM, signal.SIGUSR1))
        try:
            got = []
            for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
                os.kill(os.getpid(), signum)
                got.append(await inbox.get())
            return got
        finally:
            inbox.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        got = runner.run(main())
    assert got == [signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM]


async def test_a_process_that_waited_once_is_killed_by_the_second_signal():
    """Goal: a second SIGTERM ends it at once; method: a real process, signalled twice."""
    program = textwrap.dedent(
        """
        import asyncio
        from plumbing.pod.cli import run_async
        from plumbing.service.signals import until_ended

        async def main():
            loop = asyncio.get_running_loop()
            loop.call_soon(lambda: print("ready", flush=True))
            await until_ended(loop.create_future())
            print("ended", flush=True)
            await asyncio.Event().wait()

        run_async(main)
        """
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE
    )
    assert await process.stdout.readline() == b"ready\n"
    process.terminate()
    assert await process.stdout.readline() == b"ended\n"
    process.terminate()
    assert await process.wait() == -signal.SIGTERM

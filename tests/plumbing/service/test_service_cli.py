"""Goal: settings as flags, errors as one sentence with their exit code, bugs with a stack trace."""

import json
import os
import resource
import sys
import textwrap

import click
import pytest
from click.testing import CliRunner

from plumbing.errors import UnderstudyError, UnreachableError
from plumbing.pod.cli import options
from plumbing.service.config import Option
from tests.helpers import run_command

OPTIONS = (
    Option("http_port", int, default=9400, help="Port of the probes."),
    Option("service", str, default=(), many=True),
    Option("verify", bool, default=True),
)


@click.command()
@options(OPTIONS)
def serve(config):
    if config["http_port"] == 1:
        raise UnderstudyError("service.port_in_use", "port 1 is in use.")
    click.echo(f"{config['http_port']} {config['service']} {config['verify']}")


@click.command()
@options(OPTIONS)
@click.option("--json", "as_json", is_flag=True)
@click.argument("names", nargs=-1)
def status(config, as_json, names):
    if not names:
        raise UnreachableError("wire.unreachable", "Nobody answers.", path="/x")
    click.echo(f"{as_json} {names}")


def invoke(command, *args, **environ):
    return CliRunner().invoke(command, args, env=environ)


@pytest.mark.parametrize(
    ("args", "exit_code", "sentence"),
    [
        (("--http-port", "1"), 1, "error: port 1 is in use. [service.port_in_use]\n"),
        (("--http-port", "x"), 2, "error: --http-port is 'x': it must be a whole number"),
    ],
)
def test_errors_are_one_sentence_with_their_exit_code(args, exit_code, sentence):
    """Goal: no stack trace for people; method: errors from settings and from the command."""
    result = invoke(serve, *args)
    assert result.exit_code == exit_code
    assert result.stderr.startswith(sentence)
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


def test_errors_of_a_json_command_are_json_on_stdout_too():
    """Goal: one document on stdout; method: fail with and without --json."""
    result = invoke(status, "--json")
    assert result.exit_code == 3
    assert json.loads(result.stdout)["error"] == {
        "code": "wire.unreachable",
        "message": "Nobody answers.",
        "details": {"path": "/x"},
    }
    assert invoke(status).stdout == ""
    assert invoke(status, "--json", "a", "b").stdout == "True ('a', 'b')\n"


def run_program(body, **environ):
    program = "from plumbing.pod.cli import run_async\n" + textwrap.dedent(body)
    return run_command(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONDEVMODE": "", "PYTHONASYNCIODEBUG": "", **environ},
    )


def test_run_async_uses_uvloop_and_raises_the_descriptor_limit():
    """Goal: the loop and the limit of every server; method: start with a low soft limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    done = run_program(
        f"""
        import asyncio, resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, {hard}))
        async def main():
            print(type(asyncio.get_running_loop()).__module__)
            print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
            return 7
        print(run_async(main))
        """
    )
    assert done.stdout.split() == ["uvloop", str(hard), "7"], done.stderr


def test_run_async_error_is_a_sentence_and_a_bug_is_a_stack_trace():
    """Goal: who is at fault decides; method: one of each."""
    raises = "async def main(): raise {}\nfrom plumbing.errors import *\nrun_async(main)\n"
    done = run_program(raises.format("UsageError('a.b', 'It is wrong.')"))
    assert (done.returncode, done.stderr) == (2, "error: It is wrong. [a.b]\n")
    done = run_program(raises.format("InvariantError('two active')"))
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_our_own_fault_in_a_callback_ends_the_process():
    """Goal: a bug in a callback of the loop is not logged and forgotten: the process ends with its
    trace, and nothing of it runs afterwards. Method: a real process."""
    done = run_program(
        """
        import asyncio
        async def main():
            asyncio.get_running_loop().call_soon(lambda: 1 / 0)
            await asyncio.sleep(60)
        run_async(main)
        """
    )
    assert done.returncode == 70
    assert "ZeroDivisionError" in done.stderr


def test_fault_of_uvloop_alone_is_logged():
    """Method: a callback whose frames are all uvloop's, as of TLS on a connection just closed."""
    done = run_program(
        """
        import asyncio
        async def main():
            names = {}
            text = "def fault(): raise RuntimeError('the handler is closed')"
            exec(compile(text, "uvloop/sslproto.pyx", "exec"), names)
            asyncio.get_running_loop().call_soon(names["fault"])
            await asyncio.sleep(0)  # behind the fault
            return "it goes on"
        print(run_async(main))
        """
    )
    assert (done.returncode, done.stdout) == (0, "it goes on\n")
    assert "the handler is closed" in done.stderr

"""The check of what a test leaves finds all that it says, and nothing else."""

import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from jgraph.rpc.sockets.listener import PREFIX
from tests.support import left
from tests.support.left import nothing_left
from tests.support.spawned import spawned

TEMPORARY = "import tempfile; tempfile.mkstemp()"


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    """Ends what is begun, once it was found."""
    monkeypatch.setattr(left, "_END_S", 0.1)
    with ExitStack() as stack:
        yield stack


def begin_a_process(stack: ExitStack) -> None:
    command = [sys.executable, "-c", "input()"]
    child = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE))
    stack.callback(child.kill)


def listen(stack: ExitStack) -> None:
    stack.enter_context(socket.create_server(("127.0.0.1", 0)))


def listen_on_this_machine(stack: ExitStack) -> None:
    there = stack.enter_context(socket.socket(socket.AF_UNIX))
    there.bind(f"\0{PREFIX}left")
    there.listen()


def begin_a_thread(stack: ExitStack, name: str) -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait, name=name)
    thread.start()
    stack.callback(thread.join)
    stack.callback(over.set)


def say_hello(pipe: Connection) -> None:
    pipe.send("hello")


def make_a_file(stack: ExitStack) -> None:
    tempfile.mkdtemp()


def let_a_child_make_a_file(stack: ExitStack) -> None:
    subprocess.run([sys.executable, "-c", TEMPORARY], check=True)


@pytest.mark.parametrize(
    "leave",
    [
        begin_a_process,
        listen,
        listen_on_this_machine,
        partial(begin_a_thread, name="jgraph-checkpoint_0"),
        make_a_file,
        let_a_child_make_a_file,
    ],
)
def test_what_is_left_is_found(
    stack: ExitStack, tmp_path: Path, leave: Callable[[ExitStack], None]
) -> None:
    check = nothing_left(tmp_path / "temporary")
    check.__enter__()
    leave(stack)
    with pytest.raises(AssertionError):
        check.__exit__(None, None, None)


def test_what_was_there_before_and_what_stays_on_purpose_may_be_left(
    stack: ExitStack, tmp_path: Path
) -> None:
    begin_a_process(stack)
    listen(stack)
    begin_a_thread(stack, "jgraph-rejoin")
    with nothing_left(tmp_path / "temporary"):
        begin_a_thread(stack, "jgraph-loop")
        begin_a_thread(stack, "of somebody else")


@pytest.mark.procs
@pytest.mark.slow
def test_process_that_was_spawned_may_leave_what_python_began_for_it(
    tmp_path: Path,
) -> None:
    with nothing_left(tmp_path / "temporary"), spawned(say_hello) as (_, pipe):
        assert pipe.recv() == "hello"

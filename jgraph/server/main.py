"""Main function of a server process: logging, signals, exit code."""

import logging
import signal
import threading
from collections.abc import Callable
from typing import Final, TextIO

from jgraph.cluster.deadlines import DRAIN_S
from jgraph.cluster.log_tail import FORMAT
from jgraph.cluster.spec import ClusterSpec
from jgraph.coordination.liveness.restarts import REPLACED
from jgraph.errors import ClusterSpecError
from jgraph.server.overdue import leave
from jgraph.server.process_setup import load_compiler
from jgraph.server.server import Server

_LOG = logging.getLogger("jgraph.server")
_FORCE_S: Final = 5.0


def configure_logging() -> None:
    """Logs to standard error, a line an event."""
    logging.basicConfig(level=logging.INFO, format=FORMAT)
    # JAX tells at INFO of every accelerator that a host does not have.
    logging.getLogger("jax").setLevel(logging.WARNING)


def serve(
    server: Server,
    orders: TextIO | None = None,
    answers: TextIO | None = None,
    sigterm_code: int = 0,
    ready: Callable[[], None] = lambda: None,
) -> int:
    """Waits until the server ends, and returns the exit code of its process.

    It ends by SIGTERM, SIGINT, a ``Shutdown`` call or orders, and when another process
    has its place: then the exit code is 75, and launchers leave it ended. SIGTERM
    drains: no new work, steps in flight get 30 s.

    Args:
      server: a started server.
      orders: where a parent process writes cluster descriptions, one JSON a line.
        Its end means that the parent is gone, and then the server ends too.
      answers: gets a line when a description is in force.
      sigterm_code: the exit code after SIGTERM, for who starts again what did not end
        with 0.
      ready: called when signals are handled, to say that the task serves.
    """
    code = 0

    def end(grace_s: float) -> None:
        threading.Thread(target=server.stop, args=(grace_s,), daemon=True).start()
        # For an event loop that computes, and hears of nothing.
        by_force = threading.Timer(grace_s + _FORCE_S, lambda: leave(code))
        by_force.daemon = True
        by_force.start()

    def on_signal(number: int, frame: object) -> None:
        nonlocal code
        if number == signal.SIGTERM:
            code = sigterm_code
        _LOG.info("%s got %s and ends", server.task, signal.Signals(number).name)
        end(DRAIN_S if number == signal.SIGTERM else 1.0)

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    ready()
    loading = threading.Thread(target=load_compiler, daemon=True)
    if orders is None:
        loading.start()
    else:
        facts = (server, orders, answers, loading.start, end)
        threading.Thread(target=_follow_orders, args=facts, daemon=True).start()
    server.join()
    if loading.is_alive():  # the end of Python under a compiler is an abort
        loading.join()
    code = code if server.replaced is None else REPLACED
    if server.computes:  # for whose thread the end of Python would wait
        _LOG.warning("%s exits while a computation still runs", server.task)
        leave(code)
    return code


def _follow_orders(
    server: Server,
    orders: TextIO,
    answers: TextIO | None,
    joined: Callable[[], None],
    end: Callable[[float], None],
) -> None:
    for number, line in enumerate(orders):
        try:
            server.set_cluster(ClusterSpec.from_json(line))
        except ClusterSpecError:
            _LOG.exception("bad cluster description from the parent process")
            continue
        if number == 0:
            joined()  # before the answer: whoever has it may end this process
        if answers is not None:
            answers.write("joined\n")
            answers.flush()
    end(1.0)

"""The process of one task of a local cluster: ``… child ps 0 SPEC auto DIR 10``.

``… child worker join SPEC …`` is a task that joins the cluster of ``SPEC``, and tells
which one it is.

``SPEC`` is what is known of the cluster, as JSON: at first this task alone, on any
port; all of it when the task is started again. The number is ``overdue_s`` of the
server, or empty. Further arguments are patterns of import paths that data may come
from.

It tells its address on standard output, takes the cluster's description from standard
input, tells that it has it, and ends when its input closes: no task outlives the
process that started it.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from jgraph.cluster.spec import ClusterSpec
from jgraph.cluster.transport_choice import TransportChoice, target_of
from jgraph.launch.local.processes import JOINS, hand_over_stdout
from jgraph.loading import end_uncollected, uncollected

if TYPE_CHECKING:
    from jgraph.server.server import Server


def main(
    job: str,
    index: str,
    spec: str,
    transport: TransportChoice,
    tls: str,
    overdue: str,
    allow_sources: Sequence[str],
) -> int:
    """Serves one task on loopback; returns the exit code."""
    parent = hand_over_stdout()
    with uncollected():
        from jgraph.server.main import configure_logging
        from jgraph.server.process_setup import set_up_process
        from jgraph.server.server import Server
    end_uncollected()
    set_up_process()
    configure_logging()
    options: Any = {
        "transport": transport,
        "allow_sources": allow_sources,
        "overdue_s": float(overdue) if overdue else None,
    }
    cluster = ClusterSpec(json.loads(spec), port_zero=True)
    if index == JOINS:
        from jgraph.server.members.joining import join_cluster

        target = target_of(cluster.address(cluster.tasks()[0]), tls or None)
        server = join_cluster(target, job, tls=Path(tls) if tls else None, **options)
    else:
        server = Server(cluster, job, int(index), tls=tls or None, **options)
    return tell_and_serve(server, parent)


def tell_and_serve(server: "Server", parent: TextIO) -> int:
    """Tells who has started this process where it serves, and follows its orders.

    Returns:
      The exit code.
    """
    from jgraph.server.main import serve

    def ready() -> None:
        facts = {"address": server.address, "task": server.task}
        parent.write(json.dumps(facts) + "\n")
        parent.flush()

    return serve(server, orders=sys.stdin, answers=parent, ready=ready)


if __name__ == "__main__":
    job, index, spec = sys.argv[1:4]
    choice = cast(TransportChoice, sys.argv[4])  # the server checks it
    tls, overdue = sys.argv[5:7]
    sys.exit(main(job, index, spec, choice, tls, overdue, sys.argv[7:]))

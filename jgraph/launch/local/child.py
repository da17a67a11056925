"""The process of one task of a local cluster: ``… child ps 0 SPEC auto DIR 10``.

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
from typing import cast

from jgraph.cluster.spec import ClusterSpec
from jgraph.cluster.transport_choice import TransportChoice
from jgraph.launch.local.processes import hand_over_stdout
from jgraph.loading import end_uncollected, uncollected


def main(
    job: str,
    index: int,
    spec: str,
    transport: TransportChoice,
    tls: str,
    overdue: str,
    allow_sources: Sequence[str],
) -> int:
    """Serves one task on loopback; returns the exit code."""
    with uncollected():
        from jgraph.server.main import configure_logging, serve
        from jgraph.server.process_setup import set_up_process
        from jgraph.server.server import Server
    end_uncollected()
    set_up_process()
    configure_logging()
    parent = hand_over_stdout()
    server = Server(
        ClusterSpec(json.loads(spec), port_zero=True),
        job,
        index,
        transport=transport,
        tls=tls or None,
        allow_sources=allow_sources,
        overdue_s=float(overdue) if overdue else None,
    )
    parent.write(json.dumps({"address": server.address}) + "\n")
    parent.flush()
    return serve(server, orders=sys.stdin, answers=parent)


if __name__ == "__main__":
    job, index, spec = sys.argv[1:4]
    choice = cast(TransportChoice, sys.argv[4])  # the server checks it
    tls, overdue = sys.argv[5:7]
    sys.exit(main(job, int(index), spec, choice, tls, overdue, sys.argv[7:]))

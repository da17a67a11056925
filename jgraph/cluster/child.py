"""The process of one task of a local cluster: ``jgraph.cluster.child ps 0 auto DIR``.

Further arguments are patterns of import paths that data may come from.

It tells its address on standard output, takes the cluster's description from standard
input, tells that it has it, and ends when its input closes: no task outlives the
process that started it.
"""

import json
import sys
from collections.abc import Sequence

from jgraph.cluster.allocator import keep_memory
from jgraph.cluster.processes import hand_over_stdout
from jgraph.cluster.server import Server
from jgraph.cluster.serving import configure_logging, serve
from jgraph.cluster.transport_choice import TransportChoice


def main(
    job: str,
    index: int,
    transport: TransportChoice,
    tls: str,
    allow_sources: Sequence[str],
) -> None:
    """Serves one task on a free loopback port."""
    keep_memory()
    configure_logging()
    parent = hand_over_stdout()
    server = Server(
        {job: {index: "127.0.0.1:0"}},
        job,
        index,
        transport=transport,
        tls=tls or None,
        allow_sources=allow_sources,
    )
    parent.write(json.dumps({"address": server.address}) + "\n")
    parent.flush()
    serve(server, orders=sys.stdin, answers=parent)


if __name__ == "__main__":
    choice: TransportChoice = "grpc" if sys.argv[3] == "grpc" else "auto"
    main(sys.argv[1], int(sys.argv[2]), choice, sys.argv[4], sys.argv[5:])

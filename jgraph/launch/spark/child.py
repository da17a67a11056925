"""The process of one server, begun by a Spark task: ``… child ps 0 SPEC auto 10``.

``SPEC`` is what is known of the cluster, as JSON: this task alone, at a port of this
host or any. The number is ``overdue_s`` of the server, or empty. Further arguments are
patterns of import paths that data may come from.

It makes its private key itself and tells a request to sign it on standard output. It
takes certificate, authority and token from standard input, and from then on is as the
process of a task of a local cluster: it tells its address, takes descriptions of the
cluster, and ends when its input closes.
"""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from jgraph.cluster.spec import ClusterSpec
from jgraph.cluster.transport_choice import TransportChoice
from jgraph.graph.device import TaskName
from jgraph.launch.local.child import tell_and_serve
from jgraph.launch.local.processes import hand_over_stdout
from jgraph.loading import end_uncollected, uncollected
from jgraph.rpc.security.certificates import signing_request
from jgraph.rpc.security.tls import file_stem
from jgraph.rpc.security.token import NAME


def main(
    job: str,
    index: int,
    spec: ClusterSpec,
    transport: TransportChoice,
    overdue: str,
    allow_sources: Sequence[str],
) -> int:
    """Serves one task; returns the exit code."""
    task = TaskName(f"/job:{job}/task:{index}")
    parent = hand_over_stdout()
    key, request = signing_request(task)
    parent.write(json.dumps({"request": request.decode()}) + "\n")
    parent.flush()
    with uncollected():
        from jgraph.server.main import configure_logging
        from jgraph.server.process_setup import set_up_process
        from jgraph.server.server import Server
    end_uncollected()
    set_up_process()
    configure_logging()
    if not (line := sys.stdin.readline()):
        return 1  # nobody wants it any more
    signed = json.loads(line)
    stem = file_stem(task)
    files = {
        "ca.crt": signed["ca"],
        NAME: signed["token"],
        f"{stem}.crt": signed["certificate"],
        f"{stem}.key": key.decode(),
    }
    with tempfile.TemporaryDirectory(prefix="jgraph-") as directory:  # for us alone
        _write(Path(directory), files)
        server = Server(  # has read them when it has started
            spec,
            job,
            index,
            bind=spec.address(task).rpartition(":")[0],
            transport=transport,
            tls=directory,
            token_file=Path(directory) / NAME,
            allow_sources=allow_sources,
            overdue_s=float(overdue) if overdue else None,
        )
    return tell_and_serve(server, parent)


def _write(directory: Path, files: Mapping[str, str]) -> None:
    for name, content in files.items():
        path = directory / name
        path.touch(0o600)
        path.write_text(content, encoding="ascii")


if __name__ == "__main__":
    job, index, described, choice, overdue = sys.argv[1:6]
    sys.exit(
        main(
            job,
            int(index),
            ClusterSpec(json.loads(described), port_zero=True),
            cast(TransportChoice, choice),  # the server checks it
            overdue,
            sys.argv[6:],
        )
    )

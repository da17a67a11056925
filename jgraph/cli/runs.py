"""The runs of a cluster that go on without their clients."""

from dataclasses import asdict

from jgraph.cli.options import (
    Certificates,
    Json,
    Name,
    Target,
    Timeout,
    TokenFile,
    say,
    target_of,
)


def runs(
    target: Target = None,
    name: Name = "default",
    timeout: Timeout = 10,
    tls_dir: Certificates = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """List the runs that go on without their clients: fit(…, detached=True).

    Another client finds one again with trainer.attach(NAME).
    """
    from jgraph.cluster.visit import visiting

    where, files = target_of(target, name), {"tls": tls_dir, "token_file": token_file}
    with visiting(where, timeout_s=timeout, **files) as visit:
        found = visit.runs()
    lines = [
        f"{run.name}  {run.state}  step {run.step}/{run.steps}  {run.seconds:.1f} s  "
        f"master {run.master}"
        for run in found
    ]
    text = "\n".join(lines) or "no run goes on without its client"
    say([asdict(run) for run in found], text, as_json=as_json)

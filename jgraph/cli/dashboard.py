"""``jgraph dashboard``: serves the page of a cluster, or of a journal of one."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jgraph.cli.options import (
    Certificates,
    Json,
    Name,
    Target,
    Timeout,
    TokenFile,
    metrics_token,
    say,
    target_of,
)
from jgraph.errors import (
    ClusterUnreachableError,
    ConfigError,
    DeadlineError,
    TaskLostError,
)

if TYPE_CHECKING:
    from jgraph.dashboard.app import Source


def dashboard(
    target: Target = None,
    name: Name = "default",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port; 0 takes any free one.")
    ] = 8472,
    bind: Annotated[
        str, typer.Option(help="Address of loopback to listen on.")
    ] = "127.0.0.1",
    journal: Annotated[
        Path | None,
        typer.Option(help="File to write all that is seen to, for --replay."),
    ] = None,
    models: Annotated[
        list[str] | None,
        typer.Option(help="Address of a model server to show too; may be repeated."),
    ] = None,
    models_token_file: Annotated[
        Path | None,
        typer.Option(
            help="Token that model servers want. If unset: ~/.jgraph/serve_token, if "
            "it is there.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(help="Show a journal, and ask no cluster.", dir_okay=False),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(help="With --replay or --report: its time, 2026-11-24T15:04:05."),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            help="Write a page with all that a journal has at its end, or --at a time, "
            "to --output, and do no more.",
            dir_okay=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="File of the --report; report.html if unset."
        ),
    ] = None,
    view_token_file: Annotated[
        Path | None,
        typer.Option(help="File to write the token of the page to, mode 0600."),
    ] = None,
    metrics_token_file: Annotated[
        Path | None,
        typer.Option(
            help="File with a token that is good for /metrics alone, for Prometheus.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="Further host name by which browsers reach it: of a proxy."),
    ] = None,
    embed_origin: Annotated[
        list[str] | None,
        typer.Option(help="Origin of pages that may show it in a frame."),
    ] = None,
    grafana: Annotated[
        Path | None,
        typer.Option(help="Write a dashboard for Grafana to a file, and do no more."),
    ] = None,
    attended: Annotated[
        bool,
        typer.Option("--attended", help="End when standard input ends."),
    ] = False,
    timeout: Timeout = 5,
    tls_dir: Certificates = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Serve a page that shows a cluster live, or a journal of one; Ctrl-C ends it.

    The address that is printed has a token of this page in it, which lets nobody run
    anything. With --json, print one line of JSON with the address.
    """
    try:
        from jgraph.dashboard import serve
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the dashboard needs the package {error.name}; install what it needs: "
            "pip install 'jgraph[dashboard]'"
        ) from error
    if grafana is not None:
        from jgraph.dashboard.grafana import dashboard as of_grafana

        _write(grafana, json.dumps(of_grafana(), indent=1) + "\n", "--grafana")
        text = f"wrote {grafana}; in Grafana: Dashboards, New, Import"
        say({"path": str(grafana)}, text, as_json=as_json)
        return
    if report is not None:
        if replay is not None:
            raise typer.BadParameter("--report names the journal: leave out --replay")
        path = _reported(report, output or Path("report.html"), at)
        say({"path": str(path)}, f"wrote {path}; it needs no server", as_json=as_json)
        return
    if output is not None:
        raise typer.BadParameter(
            "--output is the file of a report: name its journal with --report"
        )
    options = serve.Options(
        bind=bind,
        port=port,
        allowed_hosts=allowed_host or (),
        embed_origins=embed_origin or (),
        token_file=view_token_file,
        metrics_token=metrics_token(metrics_token_file),
    )
    watched = (models or [], models_token_file)
    with _source(
        target, name, journal, replay, at, timeout, tls_dir, token_file, watched
    ) as source:
        server = serve.DashboardServer(source, options)
        facts = {"url": server.url, "port": server.port, **source.config()}
        said = f"the dashboard is at\n\n  {server.url}\n\nCtrl-C ends it"
        typer.echo(json.dumps(facts) if as_json else said)
        sys.stdout.flush()
        with suppress(KeyboardInterrupt):
            server.run(sys.stdin.read if attended else None)


def _reported(journal: Path, path: Path, at: str | None) -> Path:
    from jgraph.dashboard.report import report
    from jgraph.dashboard.sources import ReplaySource

    past = ReplaySource(journal, None if at is None else _seconds(at))
    if path.exists() and path.samefile(journal):
        raise typer.BadParameter(
            f"--output is the journal itself, which would be lost; name another file "
            f"than {path}"
        )
    _write(path, report(past), "--output")
    return path


def _write(path: Path, text: str, option: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}; name a file in a directory of "
            f"yours with {option}"
        ) from error


@contextmanager
def _source(
    target: str | None,
    name: str,
    journal: Path | None,
    replay: Path | None,
    at: str | None,
    timeout_s: float,
    tls_dir: Path | None,
    token_file: Path | None,
    watched: tuple[list[str], Path | None],
) -> "Iterator[Source]":
    from jgraph.dashboard.sources import LiveSource, ReplaySource

    if replay is not None:
        if journal is not None:
            raise typer.BadParameter("--replay asks no cluster, and has no --journal")
        yield ReplaySource(replay, None if at is None else _seconds(at))
        return
    if at is not None:
        raise typer.BadParameter("--at is a time of a journal: name one with --replay")
    from jgraph.client.inspect import inspecting

    where, files = target_of(target, name), {"tls": tls_dir, "token_file": token_file}
    with inspecting(where, timeout_s=timeout_s, **files) as visit:
        # One that is silent may come; one that refuses whoever asks will not.
        with suppress(ClusterUnreachableError, TaskLostError, DeadlineError):
            visit.status()
        try:
            models, models_token_file = watched
            token = _models_token(models_token_file) if models else ""
            source = LiveSource(
                visit, where, journal, models=models, models_token=token
            )
        except OSError as error:
            raise ConfigError(
                f"cannot write the journal {journal}: {error.strerror}; name a file in "
                "a directory of yours with --journal"
            ) from error
        source.start()
        try:
            yield source
        finally:
            source.close()


def _seconds(at: str) -> float:
    try:
        return datetime.fromisoformat(at).timestamp()
    except ValueError:
        raise typer.BadParameter(
            f"--at {at!r:.40} is no time; write for example 2026-11-24T15:04:05"
        ) from None


def _models_token(path: Path | None) -> str:
    from jgraph.rpc.security.token import SERVE_NAME, Token, home

    path = path or home() / SERVE_NAME
    return Token.read(path).value if path.exists() else ""

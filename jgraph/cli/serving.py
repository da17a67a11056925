"""``jgraph export``, ``serve`` and ``predict``: versions of models, their servers."""

import gc
import inspect
import json
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated, Any

import typer

from jgraph.cli.options import Json, Timeout, say


def _directory(typed: str) -> Path:
    if not typed:  # which a path takes for the working directory
        raise typer.BadParameter("it is empty; name a directory, or . for this one")
    return Path(typed)


def export(
    checkpoint: Annotated[
        Path, typer.Argument(help="A checkpoint, or a directory of steps.")
    ],
    where: Annotated[
        str,
        typer.Argument(
            help="The Trainer, or a function that makes it, as train.py:trainer.",
            metavar="FILE.py:TRAINER",
        ),
    ],
    example: Annotated[
        str, typer.Option(help="Name of a batch in the same file, for names and types.")
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            parser=_directory,
            metavar="PATH",
            help="Directory of the model: models/ctr.",
        ),
    ],
    fn: Annotated[
        str, typer.Option(help="Name of a function in the file: fn(model, x).")
    ] = "",
    label: Annotated[
        str | None, typer.Option(help="What the version is to be called.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Export a model from a checkpoint. Runs the file; nothing is trained."""
    from jgraph.cli.show import object_at
    from jgraph.errors import ConfigError, JGError
    from jgraph.graph.tracing.concrete import failure
    from jgraph.train.export import export as write
    from jgraph.train.trainer import Trainer

    file = where.rpartition(":")[0]
    trainer = object_at(where)[1]
    if not isinstance(trainer, Trainer) and callable(trainer):
        try:
            inspect.signature(trainer).bind()
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"'{where}' cannot be called without arguments ({error}); name a "
                "Trainer, or a function that makes one by itself"
            ) from error
        trainer = trainer()
    if not isinstance(trainer, Trainer):
        raise ConfigError(f"'{where}' is a {type(trainer).__name__}; name a Trainer")
    trainer.restore(checkpoint)
    batch = object_at(f"{file}:{example}")[1]
    function = object_at(f"{file}:{fn}")[1] if fn else None
    try:
        model = write(trainer, batch, output, fn=function, label=label)
    except JGError:
        raise
    except Exception as error:
        what = f"'{fn}'" if fn else "the model"
        raise ConfigError(
            f"{what} failed on the example '{example}'{failure(error)}; name a batch "
            "that it takes with --example, or with --fn a function fn(model, x) of the "
            "file that gives the model what it takes"
        ) from error
    facts = {"path": str(model.path), "version": model.version, "nbytes": model.nbytes}
    say(facts, f"{model.path}: {model.nbytes:,} bytes", as_json=as_json)


def serve(
    models: Annotated[
        Path, typer.Argument(help="A directory of models, or one model.")
    ],
    http_port: Annotated[
        int, typer.Option(help="Port for REST; 0: any that is free; -1: none.")
    ] = 8000,
    grpc_port: Annotated[
        int, typer.Option(help="Port for gRPC; 0: any that is free; -1: none.")
    ] = 8001,
    bind: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    watch_s: Annotated[
        float, typer.Option(min=0.05, help="How often to look for new versions.")
    ] = 2.0,
    allow_control: Annotated[
        bool, typer.Option("--allow-control", help="Callers may load and unload.")
    ] = False,
    token_file: Annotated[
        Path | None,
        typer.Option(help="What callers show. If unset: ~/.jgraph/serve_token."),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="Certificate of the server, PEM.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key, PEM.")] = None,
    insecure_i_accept: Annotated[
        bool,
        typer.Option(
            "--insecure-i-accept",
            help="Listen beyond this machine in plain text, in a network of your own.",
        ),
    ] = False,
    max_message: Annotated[int, typer.Option(min=1024, help="Bytes of a request.")] = 64
    << 20,
    max_connections: Annotated[
        int, typer.Option(min=1, help="Connections over HTTP; more are refused.")
    ] = 1024,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="A cluster that computes models over tasks: jgraph://host:8470."
        ),
    ] = None,
    tls_dir: Annotated[
        Path | None, typer.Option(help="Certificates for the cluster.")
    ] = None,
    drain_s: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=3600.0,
            help="After SIGTERM: seconds to go on while saying 'not ready'.",
        ),
    ] = 5.0,
    as_json: Json = False,
) -> None:
    """Serve exported models over REST and gRPC; new versions are taken as they come."""
    from jgraph.errors import ConfigError
    from jgraph.server.process_setup import (
        compile_behind_others,
        set_up_process,
        wait_where_asked,
    )

    wait_where_asked()  # before gRPC is loaded
    from jgraph.serving.model_server import LOADER_NICE, ModelServer

    if (tls_cert is None) != (tls_key is None):
        raise ConfigError("give --tls-cert and --tls-key, both or none")
    if http_port < 0 and grpc_port < 0:
        raise ConfigError("nobody could ask: give --http-port or --grpc-port")
    set_up_process()
    compile_behind_others(LOADER_NICE)
    # A thread that loads a version gives way to requests ten times as often as usual.
    sys.setswitchinterval(0.0005)
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    running = None
    if cluster is not None:
        from jgraph.client.cluster import connect

        running = connect(cluster, tls=tls_dir)
    server = ModelServer(
        models,
        cluster=running,
        http_port=None if http_port < 0 else http_port,
        grpc_port=None if grpc_port < 0 else grpc_port,
        bind=bind,
        token_file=token_file,
        tls=(tls_cert, tls_key) if tls_cert and tls_key else None,
        insecure_i_accept=insecure_i_accept,
        watch_s=watch_s,
        allow_control=allow_control,
        max_message=max_message,
        max_connections=max_connections,
    )
    gc.freeze()  # what is loaded stays, and is not looked at for garbage again
    facts = {
        "http": server.url,
        "grpc": server.grpc_target,
        "token_file": str(server.token.path),
        "models": server.status(),
    }
    places = {"REST": server.url, "gRPC": server.grpc_target}
    places["token in"] = str(server.token.path)
    lines = ["   ".join(f"{kind} {at}" for kind, at in places.items() if at)]
    lines += [
        f"{row['name']} {row['version']} {row['state']} {row['reason']}"
        for row in server.status()
    ]
    ready = {row["name"] for row in server.status() if row["state"] == "READY"}
    lines += [server.curl(name) for name in sorted(ready) if server.url]
    # At once, also where the output is a file.
    print(json.dumps(facts) if as_json else "\n".join(lines), flush=True)  # noqa: T201
    while not ended.wait(1.0):
        pass
    server.stop(drain_s)
    if running is not None:
        running.close()


def predict(
    url: Annotated[str, typer.Argument(help="Of the server: http://host:8000.")],
    model: Annotated[str, typer.Argument(help="Name of a model.")],
    file: Annotated[
        str,
        typer.Argument(
            help="JSON: a list, or a dict of lists by the names of the inputs; -: from"
            " standard input.",
            metavar="FILE.json",
        ),
    ],
    version: Annotated[
        str, typer.Option(help="A number, or label:NAME; the newest if unset.")
    ] = "",
    signature: Annotated[
        str, typer.Option(help="Which function; the default one if unset.")
    ] = "",
    bench_s: Annotated[
        float,
        typer.Option("--bench", min=0.0, help="Ask for so many seconds; print rates."),
    ] = 0.0,
    clients: Annotated[
        int, typer.Option(min=1, max=1000, help="How many ask at once, with --bench.")
    ] = 1,
    token_file: Annotated[
        Path | None,
        typer.Option(help="What the server wants to see. If unset: what it made here."),
    ] = None,
    ca: Annotated[
        Path | None, typer.Option(help="Authority of its certificate, PEM.")
    ] = None,
    timeout: Timeout = 10,
    as_json: Json = False,
) -> None:
    """Ask a model server for one prediction, or measure how many it makes."""
    from jgraph.cli.model_client import ModelClient, bench
    from jgraph.errors import TokenError
    from jgraph.rpc.security.token import SERVE_NAME, Token, home

    x = _read(file)
    path = token_file or home() / SERVE_NAME
    if token_file and not path.exists():
        raise TokenError(
            f"there is no token at {path}; give --token-file the file that `jgraph "
            "serve` names when it starts, or a copy of it"
        )
    token = Token.read(path) if token_file or path.exists() else None
    asking = [ModelClient(url, token, ca, timeout) for _ in range(clients)]
    try:
        found = asking[0].predict(model, x, version, signature)
        if not bench_s:
            typer.echo(json.dumps(found))
            return
        measured = bench(
            asking, bench_s, lambda one: one.predict(model, x, version, signature)
        )
        say(measured.facts(), str(measured), as_json=as_json)
    finally:
        for one in asking:
            one.close()


def _read(file: str) -> Any:
    from jgraph.errors import ModelInputError

    where = "standard input" if file == "-" else file
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text("utf-8")
        return json.loads(text)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ModelInputError(
            f"{where} is no JSON to predict for: {why}; write [[1.0, 2.0]], or "
            '{"x": [[1.0, 2.0]]}'
        ) from error

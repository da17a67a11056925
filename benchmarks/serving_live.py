"""Answers from parameters in training: latencies, freshness, and what training keeps.

A process trains a model with two tables on a local cluster of two ps and a worker, and
serves it; another one asks. ``python -m benchmarks.serving --rows`` has its rows: the
median of a request of 1 and of 64 examples on a cluster that does not train, and the
steps of a second at 100 requests a second against those without (6); seconds until an
acknowledged update is in an answer, of a row and of a dense parameter (7).
"""

import asyncio
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import grpc
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jgraph as jg
from benchmarks import measure
from benchmarks.peer_process import ROOT
from jgraph.cluster.polling import Polling
from jgraph.serving._pb import inference_pb2 as pb

INFER: Final = "/inference.GRPCInferenceService/ModelInfer"
TABLE_ROWS: Final = 100_000
WIDTH: Final = 16
IDS: Final = 8
REFRESH_S: Final = 1.0
PER_S: Final = 100


def main(args: Sequence[str] | None = None) -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--host", action="store_true", help="used inside")
    a = parser.parse_args(args)
    if a.host:
        host()
    else:
        live(a)


def live(a: Any) -> dict[str, Any]:
    """Latencies, the share of its steps that training keeps, and freshness."""
    with hosting() as (facts, ask):
        p50 = {}
        for rows in (1, 64):
            took = asyncio.run(latencies(facts, rows, seconds=a.seconds))
            ms = measure.spread("p50_ms", [float(np.median(took)) * 1e3], 2)
            p99_ms = round(float(np.percentile(took, 99)) * 1e3, 2)
            measure.emit("serving", what="live", rows=rows, **ms, p99_ms=p99_ms)
            p50[rows] = ms["p50_ms"]
        shares, beside_ms = [], []
        for _ in range(a.rounds):
            alone = float(ask(f"train {a.seconds}"))
            began = ask(f"begin {a.seconds}")
            took = asyncio.run(latencies(facts, 1, seconds=a.seconds, per_s=PER_S))
            shares.append(float(ask("end")) / alone)
            beside_ms.append(float(np.median(took)) * 1e3)
            assert began == "begun"
        kept = measure.spread("kept", shares, 3)
        beside = measure.spread("p50_ms", beside_ms, 2)
        measure.emit("serving", what="live, training", per_s=PER_S, **kept, **beside)
        fresh = {kind: float(ask(f"fresh {kind}")) for kind in ("row", "dense")}
        told = {f"{kind}_s": seconds for kind, seconds in fresh.items()}
        measure.emit("serving", what="freshness", refresh_s=REFRESH_S, **told)
    return {"p50_ms": list(p50.values()), "kept": kept["kept"], **fresh}


@contextmanager
def hosting() -> Iterator[tuple[dict[str, str], Any]]:
    """A process that trains and serves; yields where, and what tells it something."""
    words = [sys.executable, "-m", "benchmarks.serving_live", "--host"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        words, cwd=ROOT, stdin=pipe, stdout=pipe, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        reply, order = process.stdout, process.stdin

        def ask(line: str) -> str:
            order.write(f"{line}\n")
            order.flush()
            return reply.readline().strip()

        try:
            facts = json.loads(reply.readline())
            token = Path(facts["token_file"]).read_text(encoding="ascii").strip()
            yield {"grpc": facts["grpc"], "token": token}, ask
        finally:
            order.close()
            process.wait(60)


async def latencies(
    facts: dict[str, str], rows: int, *, seconds: float, per_s: float = 0.0
) -> list[float]:
    """Seconds of each request of one caller; or of so many a second, from any."""
    metadata = (("authorization", f"Bearer {facts['token']}"),)
    bodies = [request(rows, seed) for seed in range(50)]
    took: list[float] = []
    async with grpc.aio.insecure_channel(facts["grpc"]) as channel:
        method = channel.unary_unary(INFER, None, None)

        async def one(number: int) -> None:
            began = time.perf_counter()
            await method(bodies[number % len(bodies)], metadata=metadata, timeout=60)
            took.append(time.perf_counter() - began)

        await one(0)
        took.clear()
        start, number = time.perf_counter(), 0
        async with asyncio.TaskGroup() as group:
            while (now := time.perf_counter() - start) < seconds:
                number += 1
                if per_s:
                    await asyncio.sleep(max(0.0, number / per_s - now))
                    group.create_task(one(number))
                else:
                    await one(number)
    return took


def request(rows: int, seed: int) -> bytes:
    """A request for so many examples."""
    message = pb.ModelInferRequest(model_name="ranking")
    types = ("INT32", "INT32", "FP32")
    for (name, value), type_ in zip(examples(rows, seed).items(), types, strict=True):
        message.inputs.add(name=name, datatype=type_, shape=value.shape)
        message.raw_input_contents.append(value.tobytes())
    return message.SerializeToString()


class Ranking(nnx.Module):
    """Two tables, of which eight rows each are looked up, and three dense layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.tables = nnx.List(
            [nnx.Embed(TABLE_ROWS, WIDTH, rngs=rngs) for _ in range(2)]
        )
        sizes = [(2 * WIDTH + 13, 64), (64, 64), (64, 1)]
        self.layers = nnx.List([nnx.Linear(*size, rngs=rngs) for size in sizes])

    def __call__(self, batch: Any) -> Any:
        rows = [t(batch[n]).mean(1) for t, n in zip(self.tables, "ab", strict=True)]
        x = jnp.concatenate([*rows, batch["dense"]], -1)
        for layer in self.layers[:-1]:
            x = nnx.relu(layer(x))
        return self.layers[-1](x)[:, 0]


def loss(model: Any, batch: Any) -> Any:
    return jnp.mean((model(batch) - batch["y"]) ** 2)


def examples(count: int, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    ids = [rng.integers(0, TABLE_ROWS, (count, IDS)).astype(np.int32) for _ in "ab"]
    dense = rng.standard_normal((count, 13)).astype(np.float32)
    return {"a": ids[0], "b": ids[1], "dense": dense}


def host() -> None:
    """Trains and serves, and does what its lines of input say."""
    data = examples(8192)
    data["y"] = data["dense"].sum(1)

    def fit(steps: int, *, block: bool = True) -> Any:
        return trainer.fit(
            data, steps=steps, batch_size=64, progress=False, block=block
        )

    with jg.LocalCluster(ps=2, workers=1) as cluster:
        trainer = jg.Trainer(
            Ranking(nnx.Rngs(0)), loss, optax.adagrad(0.01), cluster=cluster
        )
        fit(20)
        live = trainer.serve(
            "ranking", examples(2), http_port=None, refresh_s=REFRESH_S
        )
        with live:
            token_file = str(live.server.token.path)
            say(json.dumps({"grpc": live.grpc_target, "token_file": token_file}))
            training: Any = None
            for line in sys.stdin:
                command, _, rest = line.strip().partition(" ")
                if command == "train":
                    say(steps_per_s(fit(10**7, block=False), float(rest)))
                elif command == "begin":
                    training = fit(10**7, block=False)
                    say("begun")
                elif command == "end":
                    say(steps_per_s(training, 0.0))
                else:
                    say(seconds_until_it_shows(cluster, trainer, live, rest))


def steps_per_s(run: Any, seconds: float) -> float:
    """Steps a second of a run, which is ended; its first quarter does not count."""
    if seconds:
        threading.Event().wait(seconds)
    polling = Polling(0.05, 60)
    while run.last_report is None or len(run.metrics("loss")["seconds"]) < 40:
        if not polling.wait():
            raise RuntimeError(f"the run has not made 40 steps: {run}")
    run.stop()
    times = run.wait().metrics("loss")["seconds"]
    times = times[times > times[-1] / 4]
    return float((len(times) - 1) / (times[-1] - times[0]))


def seconds_until_it_shows(cluster: Any, trainer: Any, live: Any, kind: str) -> float:
    """Seconds from the end of a write until an answer has it."""
    step = trainer._parts.build()[0]  # noqa: SLF001  # has the variables
    name = "params/tables/0/embedding" if kind == "row" else "params/layers/2/bias"
    variable = next(one for one in step.variables if one.name == name)
    took, x = [], examples(1)
    with cluster.session() as session:
        value = session.read([variable])[name]
        for _ in range(5):
            before = live.predict(x)["y"][0]
            value = value + 1
            session.write({variable: value})
            began = time.perf_counter()
            while live.predict(x)["y"][0] == before:
                pass
            took.append(time.perf_counter() - began)
    return round(max(took), 4) if kind == "dense" else round(statistics.median(took), 4)


def say(text: object) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()

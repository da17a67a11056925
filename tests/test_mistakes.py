"""The likeliest mistakes, each made as a user makes it: what is said, and what to type.

Those of servers, ports, tokens and certificates are in ``cli/test_cli_cluster.py``,
``server/test_security.py`` and ``server/test_tls.py``.
"""

import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jgraph as jg

X = np.ones((64, 4), np.float32)
Y = np.ones((64, 1), np.float32)


def network(width: int = 8) -> nnx.Sequential:
    rngs = nnx.Rngs(0)
    return nnx.Sequential(
        nnx.Linear(4, width, rngs=rngs),
        nnx.BatchNorm(width, rngs=rngs),
        nnx.Linear(width, 1, rngs=rngs),
    )


def loss(model: Any, batch: Any) -> jax.Array:
    return jnp.mean((model(batch[0]) - batch[1]) ** 2)


def train(data: Any = (X, Y), used_loss: Any = loss, **options: Any) -> Any:
    trainer = jg.Trainer(network(), used_loss, optax.adam(1e-3))
    wanted = {"steps": 1, "batch_size": 8, "progress": False, **options}
    return trainer.fit(data, **wanted)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with (
        jg.Server({"worker": ["localhost:0"]}) as server,
        jg.connect(server.target, timeout_s=20) as found,
    ):
        yield found


def nothing_listens(cluster: Any, tmp_path: Path) -> None:
    jg.connect("jgraph://localhost:1", timeout_s=0.3)


def a_typo_in_a_host(cluster: Any, tmp_path: Path) -> None:
    jg.connect("jgraph://no-such-host.invalid:8470", timeout_s=3)


def a_loss_that_uses_the_model_outside(cluster: Any, tmp_path: Path) -> None:
    model = network()
    train(used_loss=lambda _, batch: loss(model, batch))


def a_print_in_a_step(cluster: Any, tmp_path: Path) -> None:
    def step(x: Any) -> Any:
        jax.debug.print("{}", x)
        return x + 1

    cluster.session().run(jg.function(step), 1.0)


def data_of_another_width(cluster: Any, tmp_path: Path) -> None:
    train((X[:, :3], Y))


def labels_for_half_of_the_data(cluster: Any, tmp_path: Path) -> None:
    train((X, Y[:32]))


def no_data(cluster: Any, tmp_path: Path) -> None:
    train((X[:0], Y[:0]))


def a_batch_larger_than_the_data(cluster: Any, tmp_path: Path) -> None:
    train(batch_size=100)


def a_loss_without_a_mean(cluster: Any, tmp_path: Path) -> None:
    train(used_loss=lambda model, batch: model(batch[0]))


def a_checkpoint_of_another_model(cluster: Any, tmp_path: Path) -> None:
    path = train().save(tmp_path / "c")
    jg.Trainer(network(16), loss, optax.adam(1e-3)).restore(path)


def a_checkpoint_that_is_not_there(cluster: Any, tmp_path: Path) -> None:
    jg.Trainer(network(), loss, optax.adam(1e-3)).restore(tmp_path / "none")


def a_device_that_is_not_there(cluster: Any, tmp_path: Path) -> None:
    def step(x: Any) -> Any:
        with jg.device("/job:wroker/task:0"):
            return x + 1

    cluster.session().run(jg.function(step), 1.0)


def a_missing_argument(cluster: Any, tmp_path: Path) -> None:
    cluster.session().run(jg.function(lambda a, b: a + b), 1.0)


def a_variable_read_outside(cluster: Any, tmp_path: Path) -> None:
    jg.Variable("outside", jnp.zeros(3))[...]


w = jg.Variable("w", jnp.zeros(3))


def a_variable_read_backward(cluster: Any, tmp_path: Path) -> None:
    cluster.session().run(jg.function(lambda: w[::-1]))


def a_variable_written_backward(cluster: Any, tmp_path: Path) -> None:
    def step(x: Any) -> None:
        w[::-1] = x

    cluster.session().run(jg.function(step), np.ones(3, np.float32))


def a_target_that_is_a_number(cluster: Any, tmp_path: Path) -> None:
    targets: Any = [3]
    cluster.session().run(jg.function(lambda x: x), 1.0, targets=targets)


def targets_that_are_no_list(cluster: Any, tmp_path: Path) -> None:
    targets: Any = 3
    cluster.session().run(jg.function(lambda x: x), 1.0, targets=targets)


def no_ps_for_a_strategy(cluster: Any, tmp_path: Path) -> None:
    jg.Trainer(network(), loss, optax.adam(1e-3), cluster=cluster).fit(
        (X, Y), steps=1, batch_size=8, progress=False
    )


def a_server_with_an_older_jgraph(cluster: Any, tmp_path: Path) -> None:
    with jg.Server({"worker": ["localhost:0"]}) as server:
        assert server._server is not None
        del server._server.service.methods["TaskLog"]  # which it had not yet
        jg.connect(server.target).logs("/job:worker/task:0")


def a_feed_of_five_gigabytes(cluster: Any, tmp_path: Path) -> None:
    feed = np.zeros((5, 1 << 30), np.uint8)  # never touched, so it takes no memory
    cluster.session().run(jg.function(lambda x: x[0, 0]), feed)


@pytest.mark.parametrize(
    ("mistake", "code", "said"),
    [
        (nothing_listens, "JG-101", ["localhost:1", "refused", "start: jgraph up"]),
        (a_typo_in_a_host, "JG-102", ["no-such-host.invalid", "check its spelling"]),
        (
            a_loss_that_uses_the_model_outside,
            "JG-201",
            ["BatchStat", "def loss(model, batch)"],
        ),
        (a_print_in_a_step, "JG-202", ["test_mistakes.py", "remove it, or return"]),
        (
            data_of_another_width,
            "JG-214",
            ["data[0] float32[8,3]", "what the model and the loss take"],
        ),
        (labels_for_half_of_the_data, "JG-214", ["data[1]", "32", "64", "same length"]),
        (no_data, "JG-214", ["data[0]", "no examples"]),
        (a_batch_larger_than_the_data, "JG-214", ["100", "batch_size=64 or less"]),
        (a_loss_without_a_mean, "JG-223", ["(8, 1)", "losses.mean()"]),
        (a_checkpoint_of_another_model, "JG-301", ["float32[8]", "float32[16]"]),
        (a_checkpoint_that_is_not_there, "JG-301", ["there is no checkpoint at"]),
        (
            a_device_that_is_not_there,
            "JG-221",
            ["/job:wroker/task:0", "did you mean '/job:worker/task:0'"],
        ),
        (a_missing_argument, "JG-211", ["missing", "'b'"]),
        (a_variable_read_outside, "JG-231", ["'outside'", "wrap the code"]),
        (a_variable_read_backward, "JG-223", ["'w' is float32[3]", "w[...][index]"]),
        (a_variable_written_backward, "JG-223", ["w[...].at[index].set(value)"]),
        (a_target_that_is_a_number, "JG-124", ["targets has 3", "targets=['w']"]),
        (targets_that_are_no_list, "JG-124", ["targets has 3", "targets=['w']"]),
        (no_ps_for_a_strategy, "JG-124", ["'ps'", "jg.LocalCluster(ps=1"]),
        (
            a_feed_of_five_gigabytes,
            "JG-402",
            ["5,368,709,", "over the limit of 4,294,967,296", "a smaller batch"],
        ),
        (
            a_server_with_an_older_jgraph,
            "JG-403",
            ["has no method 'TaskLog'", "runs jgraph 0.", "another version"],
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_mistake_is_named_with_what_to_type(
    mistake: Any, code: str, said: list[str], cluster: Any, tmp_path: Path
) -> None:
    with pytest.raises(jg.JGError) as caught:
        mistake(cluster, tmp_path)
    first = str(caught.value).splitlines()[0]
    assert first.startswith(f"{code} ")
    for words in said:
        assert words in first
    # The user's frames, and the one or two of ours that were called.
    ours = str(Path(jg.__file__).parent)
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert sum(frame.filename.startswith(ours) for frame in frames) <= 2
    assert frames[0].filename == __file__

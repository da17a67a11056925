"""A model that counts what is applied to it: nothing is lost, nothing comes twice."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint
from flax import nnx

from jgraph.client.cluster import Cluster
from jgraph.runtime.files.step_files import steps_in
from jgraph.train.checkpoint.checkpoints import Checkpoints
from jgraph.train.run.run import Run
from jgraph.train.strategies.strategies import Strategy
from jgraph.train.trainer import Trainer
from tests.support.ledger import examples_counted, examples_due
from tests.support.waiting import wait_until

EXAMPLES, BATCH = 64, 4
_ROUNDED = 0.01
"""A mean over three workers is no sum of powers of two."""
IDS = np.arange(EXAMPLES)


class Counts(nnx.Module):
    """Two parameters, for two ps; an update adds one to the examples of its batch."""

    def __init__(self) -> None:
        self.a = nnx.Param(np.zeros(EXAMPLES, np.float32))
        self.b = nnx.Param(np.zeros(EXAMPLES, np.float32))


def loss(model: Counts, batch: Any) -> Any:
    """Its gradient is minus the number of times that an example is in the batch."""
    ids = batch["id"] if isinstance(batch, dict) else batch  # of files
    seen = jax.nn.one_hot(ids, EXAMPLES).sum(0)
    return -((model.a[...] + model.b[...]) * seen).sum(), {"seen": seen}


def write_files(directory: Path) -> None:
    """Writes the examples to four files."""
    import pyarrow as pa
    from pyarrow import parquet

    for number, ids in enumerate(np.split(IDS, 4)):
        parquet.write_table(pa.table({"id": ids}), directory / f"{number}.parquet")


def trainer(cluster: Cluster, strategy: Strategy) -> Trainer:
    return Trainer(Counts(), loss, optax.sgd(1.0), cluster=cluster, strategy=strategy)


def after(steps: int, act: Callable[[], None], saved_in: Path | None = None) -> Any:
    """Returns a callback that acts once, when so many steps are done.

    ``saved_in``: and this directory has a checkpoint.
    """
    acted: list[bool] = []

    def callback(run: Any, report: Any) -> None:
        saved = saved_in is None or (saved_in.exists() and steps_in(saved_in))
        if report.step >= steps and saved and not acted:
            acted.append(True)
            act()

    return callback


class Ledger:
    """What steps were told of as applied, over the runs of one Trainer."""

    def __init__(self) -> None:
        self.told = np.zeros(EXAMPLES)

    def add(self, run: Run) -> None:
        """Adds the steps of a run."""
        self.told += run.metrics("seen")["value"].sum(0)

    def check(self, there: Trainer, lost: int = 0, under_way: int = 2) -> int:
        """Compares with what the parameters have counted, each for itself.

        What was told of is applied, but for the last steps of a lost worker, which are
        told of when they are computed. Each batch that counts as done is applied
        once, and those that it may have done as well are counted as dealt again.

        Args:
          there: has trained.
          lost: how many workers were.
          under_way: how many steps each of them may have had.

        Returns:
          How many batches were dealt again.
        """
        due, again = _due(there)
        for count in counted(there):
            less = (self.told - count).clip(0)
            assert less.sum() <= under_way * BATCH * lost, f"lost: {less}"
            assert (count >= due).all(), f"lost: {due - count}"
            more = count - due
            assert more.sum() <= again * BATCH, f"came twice: {more}, {again} times"
        return again


def check_together(there: Trainer, run: Run) -> None:
    """Of synchronous training: no batch came twice, or was left out."""
    position = there.current_position()
    assert position is not None
    assert position["again"] == 0
    due = examples_due(position)
    np.testing.assert_allclose(examples_counted(run), due, atol=_ROUNDED)
    # Of the last step it may not have been told, if it was on its way from a master.
    means = run.metrics("seen")["value"].sum(0)
    for count in counted(there):
        np.testing.assert_allclose(count, means, rtol=1e-6)


def check_recovered(
    there: Trainer,
    run: Run,
    back: Path | None = None,
    share: int = 1,
    torn: int = 0,
) -> None:
    """Compares the parameters of a run that went back to checkpoints with its steps.

    No batch was left out, and each update since then is applied once, by each ps. The
    checkpoint itself has of each ps what it had applied when it was copied, which is a
    moment before or after another ps was.

    Args:
      there: has trained.
      run: its run.
      back: the last checkpoint that it went back to, or began from; None: none.
      share: how many batches an update is the average of.
      torn: how many updates a loss may have ended between two ps; nobody was told
        that these are applied.
    """
    due, _ = _due(there)
    had = dict.fromkeys("ab", 0.0) if back is None else ahead(back)
    for name, count in zip("ab", counted(there), strict=True):
        left_out = due - share * count
        assert (left_out <= 0).all(), f"left out: {left_out}"
        more = _more_updates(count, run.steps) - had[name]
        assert abs(more) <= torn + _ROUNDED, f"{more} updates too many or few of {name}"


def gone_back_to(directory: Path, run: Run) -> Path | None:
    """Returns the last checkpoint that a run went back to; None: to none.

    It does not where workers gave the parameters that were lost.
    """
    back = [one.back_to for one in run.recoveries() if one.rest_of is None]
    return directory / str(back[-1]) if back else None


def ahead(checkpoint: Path) -> dict[str, float]:
    """Returns how many updates more than it counts a checkpoint has of a parameter."""
    tree = orbax.checkpoint.StandardCheckpointer().restore(checkpoint.resolve())
    steps = int(tree["global_step"])
    return {n: _more_updates(tree["params"][n], steps) for n in "ab"}


def _more_updates(count: Any, steps: int) -> float:
    return float(count.sum()) / BATCH - steps


def _due(there: Trainer) -> tuple[Any, int]:
    position = there.current_position()
    assert position is not None
    return examples_due(position), int(position["again"])


def counted(there: Trainer) -> list[Any]:
    """Returns how often each example was applied, by each parameter."""
    model = there.model()
    return [np.asarray(model.a[...]), np.asarray(model.b[...])]


def check_it_goes_on_from(there: Trainer, directory: Path) -> None:
    """Trains on from the newest checkpoint of a run that did not go on by itself."""
    there.restore(directory)
    saved = steps_in(directory)[-1]
    run = there.fit(
        IDS,
        steps=100,
        batch_size=BATCH,
        checkpoint=Checkpoints(directory, every=1000),
        progress=False,
    )
    assert run.steps == saved + 100
    check_recovered(there, run, directory / str(saved))


def goes_on(run: Run, steps: int = 20) -> None:
    """Waits until a run has done some more steps."""
    until = run.steps + steps
    wait_until(lambda: run.steps >= until or run.state != "running", 60)
    assert run.state == "running"

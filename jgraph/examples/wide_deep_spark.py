"""Wide & Deep on Spark: from DataFrames of census features to a scored DataFrame."""

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import optax
from flax import nnx

from jgraph.examples.census import load
from jgraph.examples.options import Figures, Options
from jgraph.examples.wide_deep import BATCH_SIZE, LEARNING_RATE, WideDeep, loss_fn
from jgraph.launch.spark.application import needs_pyspark
from jgraph.launch.spark.cluster import SparkCluster
from jgraph.runtime.data.batches import Array
from jgraph.train.data.source import Source
from jgraph.train.export import export
from jgraph.train.spark import predict

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FEATURES: Final = ("deep", "numbers", "wide")


def run(
    directory: Path, master: str, ps: int, workers: int, options: Options
) -> Figures:
    """Trains on a directory with ``adult.data`` and ``adult.test``, by Spark.

    The data is written once by Spark and read by the workers; the model is exported,
    the slots of the servers go back to Spark, and Spark scores the test data.

    Args:
      directory: with the data.
      master: of Spark, such as ``local[3]``, with a slot for each task.
      ps: parameter servers.
      workers: workers.
      options: how long.

    Returns:
      ``accuracy`` on the test data, ``rows`` that were scored, and ``majority``: the
      accuracy of always saying what is more frequent.

    Raises:
      ConfigError: PySpark is not installed, or the master has too few slots.
      DataError: a file is not there, or has a line that is no record.
    """
    needs_pyspark()
    from pyspark.sql import SparkSession, functions

    train, test = load(directory)
    options.say(f"starting Spark at {master}")
    if master.startswith("local"):  # else python3 of PATH, which may lack jgraph
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = SparkSession.builder.master(master).appName("wide-deep").getOrCreate()
    try:
        data = Source.spark(_frame(spark, train))
        model = WideDeep(rngs=nnx.Rngs(options.seed))
        tx = optax.adagrad(LEARNING_RATE)
        with tempfile.TemporaryDirectory(prefix="jgraph-wide-deep-") as models:
            with SparkCluster(spark, ps=ps, workers=workers) as cluster:
                trainer, _ = options.fit(cluster, model, loss_fn, tx, data, BATCH_SIZE)
                example = {name: test[name][:2] for name in FEATURES}
                exported = export(trainer, example, f"{models}/wide_deep")
            scored = predict(exported, _frame(spark, test), FEATURES, "logit float")
            is_right = (functions.col("logit") > 0) == (functions.col("label") > 0.5)
            rich = functions.avg("label")
            right = functions.avg(is_right.cast("double"))
            count = functions.count("logit")
            figures = scored.agg(right, rich, count).first()
    finally:
        spark.stop()
    accuracy, share, rows = figures
    return {
        "accuracy": round(accuracy, 4),
        "majority": round(max(share, 1 - share), 4),
        "rows": rows,
    }


def _frame(spark: "SparkSession", features: dict[str, Array]) -> "DataFrame":
    """Returns arrays as a DataFrame, without a Python object for each row."""
    import pyarrow as pa

    return spark.createDataFrame(
        pa.table({name: _column(array) for name, array in features.items()})
    )


def _column(array: Array) -> Any:
    import pyarrow as pa

    if array.ndim == 1:
        return pa.array(array)
    ends = np.arange(len(array) + 1, dtype=np.int32) * array.shape[1]
    return pa.ListArray.from_arrays(ends, pa.array(array.reshape(-1)))

"""DataFrames of Spark: written once as files to train on, and scored by a model."""

from jgraph.train.spark.scoring import predict

__all__ = ["predict"]

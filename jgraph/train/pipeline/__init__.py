"""Pipelines and towers: a model over several workers in one graph."""

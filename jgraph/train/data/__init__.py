"""Data of a training run: arrays, sources, loaders of other libraries."""

"""Evaluation and prediction, here or on a task of its own."""

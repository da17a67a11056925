"""Models in training as functions that a live server calls."""

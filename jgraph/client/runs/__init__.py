"""Runs on a cluster as their client follows them."""

"""Strategies: local, asynchronous and synchronous training."""

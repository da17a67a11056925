"""Sharding: a graph over variables becomes one over their shards."""

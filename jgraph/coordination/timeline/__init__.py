"""Timelines: when each node of a step ran, on all tasks, by one clock."""

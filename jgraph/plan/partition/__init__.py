"""Partitioning: one partition per task, cut into segments."""

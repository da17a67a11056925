"""Replica loops on a task, and the data that they read."""

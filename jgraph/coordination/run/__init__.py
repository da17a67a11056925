"""Supervision of runs: workers lost and back, masters, recovery."""

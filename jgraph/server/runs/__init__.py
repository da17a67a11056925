"""Runs on a master: supervisor, journal, checkpoints, standby."""

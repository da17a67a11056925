"""Frames between processes of one machine: shared memory, Unix socket."""

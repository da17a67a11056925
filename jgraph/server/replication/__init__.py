"""Change logs of tasks: streams to followers, write-ahead logs."""

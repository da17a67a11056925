"""State of tasks in a client's hands: snapshots, checkpoint shards, tables."""

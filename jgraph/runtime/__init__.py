"""Runtime of one task: variable store, step executor, rendezvous, compile cache."""

"""Client side of a cluster: connection, sessions, variables, runs, snapshots."""

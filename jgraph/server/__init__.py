"""Server side of a cluster: one task's service, its master, its way to end."""

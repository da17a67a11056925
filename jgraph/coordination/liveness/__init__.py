"""Liveness: leases, self-fencing, joins, restarts, backoff."""

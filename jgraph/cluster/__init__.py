"""Sessions, servers, the master service and local clusters."""

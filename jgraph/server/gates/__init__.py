"""Gates of a parameter server: bounded staleness, synchronous aggregation."""

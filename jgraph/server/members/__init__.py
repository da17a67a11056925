"""Members of a cluster: the registrar that numbers them, and processes that join."""

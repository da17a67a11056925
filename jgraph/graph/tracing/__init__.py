"""Tracing: from a Python function to one flat jaxpr."""

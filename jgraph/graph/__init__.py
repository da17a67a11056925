"""Tracing: a function over variables becomes one checked dataflow graph. Pure."""

"""Serving: which version of a model answers, and which requests run together."""

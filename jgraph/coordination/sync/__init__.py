"""Synchronous and bounded-staleness training: who may start, what counts."""

"""Compiled segments: cache by digest, allowed native calls, sizes."""

"""Differential privacy: clipping, noise, and the account of what was spent."""

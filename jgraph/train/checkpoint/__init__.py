"""Checkpoints: written, verified, pruned, read from other programs."""

"""Lowering: segments to StableHLO."""

"""Secure sums: who takes part in a round, and which shares may be told."""

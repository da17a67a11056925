"""Automatic placement: measured costs, predicted step times."""

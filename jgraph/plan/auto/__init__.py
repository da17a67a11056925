"""Automatic placement: cost model, search, predicted time and memory."""

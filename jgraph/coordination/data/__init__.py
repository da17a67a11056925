"""Batches: slots, order, leases to workers, the book of what is done."""

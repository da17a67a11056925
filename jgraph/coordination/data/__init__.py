"""Batches: slots, order, leases to workers, the ledger of what is done."""

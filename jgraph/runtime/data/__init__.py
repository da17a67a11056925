"""Data sources that a task reads: files, records, batches."""

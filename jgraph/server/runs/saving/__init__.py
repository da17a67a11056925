"""Saving of a run: its checkpoints, and halts of its loops while one is taken."""

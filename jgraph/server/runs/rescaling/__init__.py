"""Rescaling of a run on the master: its variables move to more ps, or to fewer."""

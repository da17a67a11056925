"""Resumable numbered streams, under posted frames and calls alike."""

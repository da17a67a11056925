"""Posted frames between tasks: one resumable numbered stream per pair."""

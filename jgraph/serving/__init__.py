"""Exported models and the servers that answer with them."""

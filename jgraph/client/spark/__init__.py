"""Spark applications, as clusters on them and their other jobs see them."""

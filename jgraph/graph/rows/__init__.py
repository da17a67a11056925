"""Rows of tables as operations of a graph; hash tables' keys."""

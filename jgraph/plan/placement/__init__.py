"""Placement: the task of every variable and operation."""

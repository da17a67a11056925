"""Clusters of processes on this machine: start, watch, start again."""

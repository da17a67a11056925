"""Clusters whose servers are processes of Spark tasks: start, watch, start again.

Each server is the child of a Spark task of its own: a job of one task, which keeps a
slot of an executor for as long as the server is there.
"""

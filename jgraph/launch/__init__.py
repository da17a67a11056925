"""Starting servers on other machines: what Slurm and Kubernetes are told.

Pure: text and plain objects from a few numbers; nothing here talks to either.
"""

"""Starting servers on other machines: over ssh, by Ray, Spark, Slurm, Kubernetes.

What Slurm and Kubernetes are told is text and plain objects; nothing talks to either.
"""

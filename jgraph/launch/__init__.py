"""Starting servers on other machines: over ssh, as actors of Ray, by Slurm, Kubernetes.

What Slurm and Kubernetes are told is text and plain objects; nothing talks to either.
"""

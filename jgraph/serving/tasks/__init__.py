"""Models over tasks: programs that a cluster runs, exported and served."""

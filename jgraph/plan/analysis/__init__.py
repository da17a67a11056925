"""Analysis of graphs: data flow, row accesses, axes, affinity."""

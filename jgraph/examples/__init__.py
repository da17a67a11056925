"""Examples: ``jgraph examples`` trains each with a cluster here."""

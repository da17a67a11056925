"""Examples on real data: ``jgraph examples`` trains each with a cluster here."""

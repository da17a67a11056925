"""Hash tables: embeddings for ids of an unbounded space."""

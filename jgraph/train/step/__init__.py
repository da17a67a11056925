"""Training steps as graphs: gradients, update, compression."""

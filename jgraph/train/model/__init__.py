"""Models, losses, metrics and optimizers as a training step uses them."""

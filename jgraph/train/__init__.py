"""Training API: Trainer, strategies, data, checkpoints."""

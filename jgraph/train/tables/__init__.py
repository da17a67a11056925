"""Tables by rows: lookups found in a loss, row gradients, row updates."""

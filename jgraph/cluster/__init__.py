"""Words of both sides: cluster description, messages, deadlines, event loop."""

"""State machines without clock, thread, socket or file. Pure."""

"""Messages as bytes: frames, programs, records; checked before use."""

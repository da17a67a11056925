"""State of a training between its steps: runners, values, placement."""

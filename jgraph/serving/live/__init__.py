"""Live serving: answers from parameters that are being trained."""

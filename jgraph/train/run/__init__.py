"""A training run as users see it: metrics, reports, displays, callbacks."""

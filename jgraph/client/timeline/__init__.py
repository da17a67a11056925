"""Timelines of a cluster: fetches what its tasks noted of their last steps."""

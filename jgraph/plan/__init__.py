"""Planning: placement, partitions, segments, lowering to a Program. Pure."""

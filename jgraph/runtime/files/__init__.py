"""Files of checkpoints: blocks, checksums, manifests, writer lease."""

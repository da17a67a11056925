"""Program: partitions, nodes and values as plain data."""

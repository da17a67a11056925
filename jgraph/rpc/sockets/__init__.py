"""Sockets beside gRPC streams, for frames: Unix on one host, TCP between hosts."""

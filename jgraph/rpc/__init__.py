"""Bytes on the wire: frames, codec, transports, status."""

import os

# gRPC's core writes to standard error what becomes an exception or is routine (a taken
# port, a peer that hangs up); our messages say it once. It reads this when imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

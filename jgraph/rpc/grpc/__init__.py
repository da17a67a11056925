"""The gRPC transport: service, channels, health."""

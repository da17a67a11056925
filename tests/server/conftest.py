"""Servers of this process, and a client of them."""

from tests.support.servers import cluster, servers, session

__all__ = ["cluster", "servers", "session"]

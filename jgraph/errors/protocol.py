"""Errors of the wire protocol: malformed or forbidden messages from a peer."""

from jgraph.errors.base import ProtocolError


class MalformedMessageError(ProtocolError, ValueError):
    """Bytes that are not a message of ours.

    What came in does not parse, repeats what may come once, or asks for rows that a
    table does not have. The connection ends; nothing of the message was used.

    What to do: see that only jgraph of the same version dials this port. Between tasks
    of one version it is a fault of jgraph: please report it.
    """

    code = "JG-401"


class MessageTooLargeError(ProtocolError, ValueError):
    """A message over the limit.

    A frame is larger than a task takes, or than it has memory for.

    What to do: cut the variable into shards with a partitioner, or use a smaller batch,
    so that less travels at once.
    """

    code = "JG-402"


class UnknownMethodError(ProtocolError, LookupError):
    """A call that this server does not have.

    A client or another task asked for something by a name that is not known here.

    What to do: the caller is likely of another version of jgraph; compare
    ``jgraph version`` on both hosts.
    """

    code = "JG-403"


class InvalidProgramError(ProtocolError, ValueError):
    """Program bytes that do not match their digest or do not parse.

    Also a step of a program that the task does not have any more, since it was started
    again or reset in between.

    What to do: run the function again. If it stays, something
    between client and server changes bytes.
    """

    code = "JG-203"


class ForbiddenProgramError(ProtocolError):
    """A program that may not run on this server.

    It calls native code of the server's host that is not on the short list of what JAX
    itself needs. A client with a token could otherwise reach any function loaded there.

    What to do: replace the named operation by others of `jax.numpy` or `jax.lax`.
    """

    code = "JG-204"


class PlatformError(ProtocolError):
    """A program exported for another kind of device.

    The client compiled for one platform, and the task has another: a client with a GPU
    and servers without, for example.

    What to do: say for what to compile: ``cluster.session(platforms=("cpu", "cuda"))``.
    """

    code = "JG-205"


class SecureSumError(ProtocolError):
    """A secure sum that is refused, or that has no result.

    A member was asked for what would tell its values, or for another round; or a share
    or key that came is not the one that was sent; or too few members were left.

    What to do: if too few were left, look why members go away, and make the round
    again. Else who sums, or what lies between, is wrong or not to be trusted.
    """

    code = "JG-404"

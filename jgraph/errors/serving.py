"""Errors of exported models and of the servers that answer with them."""

from jgraph.errors.base import ClusterError, UserError


class ModelNotFoundError(UserError, LookupError):
    """No such model, version, label or signature.

    A request names a model that the server does not have, or a version, label or
    signature that its model does not have. The message lists those that there are.

    What to do: correct the name; ``jgraph model ls PATH`` lists what a directory holds.
    """

    code = "JG-601"


class ModelNotReadyError(ClusterError):
    """A model that is there and cannot answer now.

    It is being loaded, could not be loaded, was unloaded, or the server is about to
    end. The message says which.

    What to do: ask again a little later, or another server; if it could not be loaded,
    ``jgraph model verify PATH`` reads all of it and names what is damaged.
    """

    code = "JG-602"


class ModelInputError(UserError, ValueError):
    """A request whose inputs are not those of the model.

    An input is missing, unknown or twice there, has another dtype or shape, or its
    bytes are not as many as its shape says; or the request is no request at all.
    Nothing was computed.

    What to do: the message has what the model takes. Values are never cast: send the
    dtype that ``GET /v2/models/NAME`` tells.
    """

    code = "JG-603"


class OverloadedError(ClusterError):
    """More requests than the server takes at a time.

    The queue of the model is full. Nothing was computed, and other requests go on.

    What to do: send the request again after the seconds of ``Retry-After``; if it
    stays, start more servers, or raise ``max_queued_rows`` in the ``model.toml``.
    """

    code = "JG-604"


class ArtifactError(UserError):
    """An exported model that is damaged, or cannot be written or used.

    The files of a version are not those that were exported, the number is taken, a
    label or an option in a file means nothing, or the function cannot be exported.

    What to do: follow the message; ``jgraph model verify PATH`` reads every byte of a
    version, and an export writes a new one beside it.
    """

    code = "JG-611"

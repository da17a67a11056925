"""Errors of users' data: numbers, batches, sources, checkpoints."""

from jgraph.errors.base import UserError


class NonFiniteError(UserError, ArithmeticError):
    """NaN or infinity where it was forbidden.

    A loss, a gradient or an argument has values that are not numbers. The update was
    not applied: the model is as it was before this step. Or an answer of a served model
    has them, and its options refuse those.

    What to do: look at the batch first, then try a smaller learning rate or
    ``optax.clip_by_global_norm``.
    """

    code = "JG-212"


class DataError(UserError, ValueError):
    """Training data that cannot be used.

    Fields of different lengths, no examples at all, a batch larger than the data, or
    examples of a shape that the loss does not take.

    What to do: all arrays need their examples along axis 0, equally many.
    """

    code = "JG-214"


class DataSlotError(UserError):
    """A piece of the data that ends the workers that get it.

    Several workers died, one after the other, on the same examples; giving these to yet
    another one would end that one too.

    What to do: look at the named examples and at the logs of the workers. What kills a
    process is most often memory: one record much larger than the others.
    """

    code = "JG-215"


class SourceError(UserError, ValueError):
    """A data source that cannot be read: missing, damaged, or of another schema.

    Files of a `jg.Source` are read on the workers. One is not there on their host, has
    a damaged record, or lacks a field that the source promises.

    What to do: the message names host, file, record and field. A format that needs a
    package says so: ``pip install 'jgraph[data]'`` where the data is read.
    """

    code = "JG-216"


class ForbiddenSourceError(UserError):
    """A data source whose import path a server does not allow.

    A source may name a function for servers to import and call. A server calls only
    what it was told to allow when it was started.

    What to do: ``jgraph server --allow-source 'package.module:function'``, or ``allow``
    under ``[sources]`` in the cluster file.
    """

    code = "JG-217"


class RowIdError(UserError, IndexError):
    """An id that names no row of its table.

    A loss looks up a row beyond the end of an embedding table, or a negative one. JAX
    alone would clamp it and train another row. The update was not applied.

    What to do: mend the ids or enlarge the table; for ids without a bound there is
    `jg.HashTable`; ``jnp.take(table, ids, axis=0, mode="fill", fill_value=0)`` gives
    zeros for them.
    """

    code = "JG-218"


class RowBudgetError(UserError):
    """A round of local steps that needs more rows than a worker may hold.

    The steps of a round look up more different rows of a table than
    ``LocalSGD(row_budget=…)`` allows. Nothing of the round was applied; the run ends
    with the updates before.

    What to do: a larger ``row_budget=``, if the hosts of the workers have the memory;
    fewer steps in a round (``sync_every=``), or smaller batches.
    """

    code = "JG-236"


class TooLargeError(UserError, MemoryError):
    """A value too large to bring to the client.

    `model()`, `predict` and `evaluate` build the whole model in your process; a table
    that lives on many parameter servers may not fit there.

    What to do: ``save(path)`` writes it to files; for evaluation while training, start
    an evaluator: ``jg.LocalCluster(…, evaluators=1)``.
    """

    code = "JG-219"


class CheckpointError(UserError):
    """A checkpoint is missing, cannot be used, or is of another model.

    There is none at the path, one is in the way of a save, the disk refuses to write,
    or the arrays in it are not those of your model and optimizer.

    What to do: ``jgraph ckpt ls DIR`` lists what is there. A checkpoint is restored
    with the model and the optimizer that wrote it; their sizes and names must match.
    """

    code = "JG-301"


class CheckpointCorruptError(CheckpointError):
    """A checkpoint that is not what was written; names the leaf.

    Every array has a checksum, and one does not match; or files are missing, or damaged
    themselves. Nothing of it was restored.

    What to do: use another step; restoring from a directory of steps does so by itself,
    and warns. ``jgraph ckpt verify DIR`` reads all of them.
    """

    code = "JG-302"


class CheckpointWriterError(CheckpointError):
    """Another process writes checkpoints into the same directory.

    Two runs that save in one directory would delete each other's steps, so the second
    is refused.

    What to do: end the other run, or give this one a directory of its own. The lease of
    a process that is gone ends by itself.
    """

    code = "JG-303"


class CheckpointSpaceError(CheckpointError):
    """The disk has no room for a checkpoint; those that are there are intact.

    It is checked before writing, and again when the disk says no.

    What to do: free the bytes that the message names, or let fewer steps be kept:
    ``jg.Checkpoints(…, keep=2)``, ``jgraph ckpt prune DIR``.
    """

    code = "JG-304"


class CheckpointPathError(CheckpointError, ValueError):
    """A path that cannot be a directory of checkpoints.

    It is the address of an object store (``gs://…``), empty, below a file, or no path;
    or a server was given one that it does not share with the client.

    What to do: give a directory of this machine; mount a store as one. Servers need not
    share it: the client then writes for them.
    """

    code = "JG-305"


class CheckpointForeignError(CheckpointError):
    """A checkpoint of another program, which jgraph does not rename, replace or delete.

    It has neither a manifest of jgraph nor its proof. What has the commit mark of Orbax
    can be read: by ``trainer.restore`` and ``jgraph ckpt import``; it has no checksums
    to compare with.

    What to do: to save, give a directory of its own. To read, name the checkpoint, or
    the directory that Orbax or Flax saved to.
    """

    code = "JG-306"

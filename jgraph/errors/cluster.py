"""Errors of clusters: a request that cannot be served now."""

from jgraph.errors.base import ClusterError


class ClusterUnreachableError(ClusterError, ConnectionError):
    """Nothing of ours listens at the address.

    The connection was refused, or something answers there that is not jgraph, or is
    another task than the cluster description says.

    What to do: see that the server is up and its log has no error, and that host and
    port are right; ``jgraph status jgraph://host:port`` tries it. On the network side,
    a server listens on loopback unless it was started with ``--bind``.
    """

    code = "JG-101"


class AddressError(ClusterError, ConnectionError):
    """A host name that does not resolve.

    Also an address that lacks its port, or one that no interface of this machine has.

    What to do: check the spelling in the cluster description, and what
    ``getent hosts NAME`` says. In Kubernetes a new pod's name may need some seconds.
    """

    code = "JG-102"


class PlainTextError(ClusterError, ConnectionError):
    """One side speaks TLS, the other plain text.

    Which of the two is in the message: it is found out with a first byte, since gRPC
    itself would only say that a socket was closed.

    What to do: give both sides certificates (``tls="DIR"`` and a ``jgraphs://`` address
    for clients, ``--tls-dir DIR`` for servers), or neither.
    """

    code = "JG-111"


class CertificateError(ClusterError, ConnectionError):
    """A certificate that is missing, expired, or of another authority.

    Both sides of a connection show a certificate, and take only those that the same run
    of ``jgraph certs`` made.

    What to do: copy the files of one run to all hosts, ``ca.crt`` too. They hold for a
    year; a clock that is wrong makes them look expired.
    """

    code = "JG-112"


class RoleError(ClusterError, ConnectionError):
    """A certificate of another task or client.

    Certificates say whose they are: ``/job:ps/task:0`` may not show that of another
    task, and a client's starts no server.

    What to do: start each task with the two files of its own name, and clients with
    ``client.crt`` and ``client.key``.
    """

    code = "JG-113"


class TokenError(ClusterError, PermissionError):
    """No token was shown, or not that of the cluster.

    The two sides hold different tokens, or the file cannot be read, is empty, or others
    may read it. Messages and logs never have a token in them.

    What to do: copy the token file from where the cluster was made, mode 0600, and name
    it with ``token_file=…``, ``--token-file`` or ``JGRAPH_TOKEN_FILE``.
    """

    code = "JG-114"


class NotAllowedError(ClusterError, PermissionError):
    """A call that the caller's role may not make.

    What only tasks may tell each other is refused from a client's certificate.

    What to do: nothing is wrong with the cluster; use a certificate of the right role.
    """

    code = "JG-115"


class InsecureError(ClusterError, PermissionError):
    """What would let strangers in, and was not asked for by name.

    A server without certificates would listen beyond loopback, where whoever can read
    the network could run programs. Or its child would, of ``SyncPS(dense="xla")``,
    where whoever reaches it could read and change what workers sum.

    What to do: make certificates with ``jgraph certs`` and give ``--tls-dir``; in a
    network that is yours alone, ``--insecure-i-accept``.
    """

    code = "JG-116"


class PortInUseError(ClusterError, OSError):
    """The address is taken.

    Something listens at the port already, most often a server of yesterday.

    What to do: ``jgraph down``, or find the process with ``ss -ltnp``; for a test, port
    0 takes a free one.
    """

    code = "JG-121"


class TaskMissingError(ClusterError, TimeoutError):
    """Listed tasks never answered.

    A cluster is there when all tasks of its description are. The message names those
    that did not answer in time, and what was heard of each.

    What to do: start the missing ones and look at their logs; give a larger
    ``timeout_s`` where they take long; or take them out of the description.
    """

    code = "JG-131"


class TaskLostError(ClusterError, ConnectionError):
    """A task went away while it was needed.

    Its process ended, its host is gone, or the connection broke. The step or the run
    that needed it ends with this error.

    What to do: look at the end of the task's log, and for the kernel's out-of-memory
    killer. Start it again, or let a launcher do so (``jgraph up --restarts``); a `fit`
    with ``checkpoint=`` goes on from the newest step by itself.
    """

    code = "JG-132"


class TaskLeavingError(TaskLostError):
    """A task that a run needs was told to end.

    Something sent it SIGTERM, or called ``cluster.drain``. A run that has
    ``checkpoint=`` saves first, waits for the task to be started again, and goes on
    with nothing lost; this error ends one that has nothing to go on from.

    What to do: give ``fit(checkpoint=…)``, or ``durability=`` to the strategy.
    """

    code = "JG-142"


class NotTakingError(TaskLostError):
    """A task does not take what is sent to it; too much waits.

    It is connected and does not read: its process is stopped, swapping, or busy for
    long. What waits for it is bounded, and the bound was reached.

    What to do: look at the task's log and at the memory of its host.
    """

    code = "JG-138"


class DeadlineError(ClusterError, TimeoutError):
    """A named wait passed its deadline.

    Every wait has one; the message says what was waited for and who had not answered.

    What to do: where the work is simply long, give a larger ``timeout_s``; else look at
    the named tasks with ``jgraph status``.
    """

    code = "JG-133"


class StartError(ClusterError):
    """A task's process ended while it was starting.

    The message has the end of its log, which says why.

    What to do: ``jgraph doctor`` checks the usual causes. When JAX cannot open a
    device, ``JAX_PLATFORMS=cpu`` starts without it.
    """

    code = "JG-134"


class CancelledStepError(ClusterError):
    """The step was stopped from outside.

    Its session was closed, its program was dropped, or a client went away.

    What to do: nothing, if you did that; else run the step again.
    """

    code = "JG-135"


class RunOverError(ClusterError):
    """The training run needs no more steps.

    Workers get it when a run has all its updates or was stopped, and end with it. Users
    see it only in logs.

    What to do: nothing.
    """

    code = "JG-136"


class StaleGradientError(ClusterError):
    """A gradient older than it may be; it is computed anew.

    With ``max_staleness`` a worker that was away for long has a gradient of a model
    that others have changed too often since. Users see it only in logs.

    What to do: nothing; if it is frequent, a worker is much slower than the others.
    """

    code = "JG-137"


class FencedError(ClusterError, PermissionError):
    """Who says this was replaced: another has taken over.

    A master that was frozen or cut off gives orders after a new one took over its run,
    or a process does after its task was started again. Nothing of it is carried out. A
    process that was frozen meanwhile, and finds when it wakes that another one has the
    address of its task, answers so to whatever it is asked.

    What to do: nothing, the run goes on with the new one; a process that was replaced
    ends by itself with exit code 75.
    """

    code = "JG-139"


class CopyLostError(ClusterError):
    """What a lost task held is nowhere kept a second time.

    With ``durability="replica"`` a ps and the one with its copy were lost, one soon
    after the other; with ``"log"`` its log cannot be written, or was damaged, or has
    begun anew within a synchronous update that another ps does not have. Or the master
    of a detached run was lost while a ps that had been started again still read from it
    what the run had done.

    What to do: go on from a checkpoint with ``trainer.restore(…)``; a `fit` with
    ``checkpoint=`` does so by itself.
    """

    code = "JG-140"


class VersionError(ClusterError):
    """Versions that cannot talk to each other.

    Those of jgraph, or of its protocol, differ.

    What to do: end all tasks, install the same version everywhere, and start them;
    ``jgraph version`` prints it. JAX and Python may differ from task to task.
    """

    code = "JG-141"


class TaskMemoryError(ClusterError, MemoryError):
    """A task has no memory for what it has to compute.

    The device or the process gave no more. The step ends, and with it a `fit`; the task
    goes on. A variable whose update it was has no value any more, and is named. Where
    the kernel ends the process instead, it is a lost task (`JG-132`).

    What to do: a smaller batch, more tasks, or fewer tasks on one machine;
    ``trainer.plan()`` and ``session.plan(…)`` show what each task has to hold.
    """

    code = "JG-143"


class RescaleError(ClusterError):
    """The tasks of a cluster cannot be others, or not so many.

    A cluster was asked for more or fewer workers than it, or a run on it, may have; who
    started it cannot start more; or a process that would join it is of no use there.
    The cluster, and what runs on it, go on as before.

    What to do: what the message names. ``jg.Elastic(workers=(least, most))`` says how
    many workers a run may have, and ``jgraph server --join`` starts one on any host.
    """

    code = "JG-144"

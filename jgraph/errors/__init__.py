"""Every exception of jgraph: one tree, a stable code each.

    JGError
    ├── UserError               what was asked cannot be done; fix the call
    │   ├── DeviceSpecError           JG-220  not a device string
    │   ├── UnknownDeviceError        JG-221  no such job or task in the cluster
    │   ├── PlacementError            JG-222  an operation cannot live where it was put
    │   ├── GraphError                JG-223  a graph that breaks a rule of graphs
    │   ├── OuterStateError           JG-201  a loss changes what it was not given
    │   ├── CallbackError             JG-202  Python callback in a shipped function
    │   ├── NotExportableError        JG-206  JAX cannot export this function
    │   ├── DeviceCountError          JG-207  a mesh larger than the task's devices
    │   ├── FeedError                 JG-211  a feed of the wrong name, shape or dtype
    │   ├── NonFiniteError            JG-212  NaN or infinity where it was forbidden
    │   ├── FetchError                JG-213  a fetch that the function does not have
    │   ├── DataError                 JG-214  training data that cannot be used
    │   ├── DataSlotError             JG-215  a piece of the data that ends workers
    │   ├── SourceError               JG-216  a data source that cannot be read
    │   ├── ForbiddenSourceError      JG-217  a data source that a server may not import
    │   ├── RowIdError                JG-218  an id that names no row of its table
    │   ├── TooLargeError             JG-219  a value too large to bring to the client
    │   ├── UninitializedError        JG-231  variable used before initialisation
    │   ├── VariableMismatchError     JG-232  one name, two shapes or dtypes or places
    │   ├── ShardingError             JG-233  a variable that cannot be cut like this
    │   ├── PipelineError             JG-234  a pipeline that cannot be
    │   ├── MemoryLimitError          JG-235  no placement keeps the limits of memory
    │   ├── RowBudgetError            JG-236  more rows in a round than may be
    │   ├── CheckpointError           JG-301  checkpoint missing, or of another model
    │   │   ├── CheckpointCorruptError    JG-302  damaged; names the leaf
    │   │   ├── CheckpointWriterError     JG-303  another process writes there
    │   │   ├── CheckpointSpaceError      JG-304  no room on the disk
    │   │   ├── CheckpointPathError       JG-305  a path that cannot be a directory
    │   │   └── CheckpointForeignError    JG-306  of another program; left alone
    │   ├── ClusterSpecError          JG-123  a cluster description that cannot be
    │   ├── ConfigError               JG-124  an option outside what is allowed
    │   ├── ClusterBusyError          JG-501  another run is using these variables
    │   ├── ModelNotFoundError        JG-601  no such model, version or label
    │   ├── ModelInputError           JG-603  inputs that are not those of the model
    │   ├── ArtifactError             JG-611  an exported model that cannot be used
    │   ├── HttpRequestError          JG-621  a request that a port for HTTP refuses
    │   └── JournalError              JG-622  no journal of a dashboard
    ├── ClusterError            the cluster cannot do it now
    │   ├── ClusterUnreachableError   JG-101  nothing listens there
    │   ├── AddressError              JG-102  host name that does not resolve
    │   ├── PlainTextError            JG-111  one side speaks TLS, the other plain text
    │   ├── CertificateError          JG-112  a certificate that proves nothing here
    │   ├── RoleError                 JG-113  a certificate of another task or client
    │   ├── TokenError                JG-114  no token of this cluster
    │   ├── NotAllowedError           JG-115  a call that this role may not make
    │   ├── InsecureError             JG-116  what would let strangers in
    │   ├── PortInUseError            JG-121  the address is taken
    │   ├── TaskMissingError          JG-131  listed tasks that never answered
    │   ├── TaskLostError             JG-132  a task went away while it was needed
    │   │   ├── NotTakingError        JG-138  a task that does not take what is sent
    │   │   └── TaskLeavingError      JG-142  a task that a run needs was told to end
    │   ├── DeadlineError             JG-133  a named wait passed its deadline
    │   ├── FencedError               JG-139  who says this was replaced
    │   ├── StartError                JG-134  a task's process ended while starting
    │   ├── VersionError              JG-141  versions that cannot talk to each other
    │   ├── CancelledStepError        JG-135  the step was stopped from outside
    │   ├── RunOverError              JG-136  the training run needs no more steps
    │   ├── StaleGradientError        JG-137  a gradient older than it may be
    │   ├── TaskMemoryError           JG-143  no memory for what it has to compute
    │   ├── RescaleError              JG-144  tasks that a cluster cannot have
    │   ├── CopyLostError             JG-140  what is nowhere kept a second time
    │   ├── ModelNotReadyError        JG-602  a model that cannot answer now
    │   └── OverloadedError           JG-604  more requests than a server takes
    ├── ProtocolError           the other side sent what it must not send
    │   ├── MalformedMessageError     JG-401  bytes that are not a message of ours
    │   ├── MessageTooLargeError      JG-402  a message over the limit
    │   ├── UnknownMethodError        JG-403  a call that this server does not have
    │   ├── SecureSumError            JG-404  a secure sum that is refused, or void
    │   ├── InvalidProgramError       JG-203  program bytes that do not match or parse
    │   ├── ForbiddenProgramError     JG-204  a program that may not run here
    │   └── PlatformError             JG-205  exported for another kind of device
    └── InternalError           JG-900  a fault of jgraph itself; please report it

The first line of a message says what happened, where, why, and what to type.
"""

from jgraph.errors.base import *  # noqa: F403
from jgraph.errors.cluster import *  # noqa: F403
from jgraph.errors.data import *  # noqa: F403
from jgraph.errors.protocol import *  # noqa: F403
from jgraph.errors.serving import *  # noqa: F403
from jgraph.errors.user import *  # noqa: F403

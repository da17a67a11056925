"""Messages about members: arrangements as they travel."""

from jgraph.cluster.methods import reading
from jgraph.coordination.liveness.members import Arrangement, Member
from jgraph.graph.device import DeviceSpec, TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.dial import split_address
from jgraph.rpc.frames import frame, installed_version
from jgraph.rpc.transport import Address, Frame


def members_message(
    arrangement: Arrangement, task: TaskName | str = "", incarnation: int = 0
) -> pb.Members:
    """Returns an arrangement as it travels.

    Args:
      arrangement: all tasks.
      task: who tells it.
      incarnation: of that.
    """
    rows = [
        pb.Member(
            task=name,
            address=member.address,
            incarnation=member.incarnation,
            leaves=member.leaves,
        )
        for name, member in arrangement.members.items()
        if arrangement.number
    ]
    return pb.Members(
        arrangement=arrangement.number,
        members=rows,
        task=task,
        incarnation=incarnation,
    )


def join_request(
    task: TaskName, incarnation: int, address: Address = "", job: str = ""
) -> Frame:
    """Returns what asks to be a task of a job, or says that this process is one.

    Args:
      task: what it is; empty: it is none yet.
      incarnation: of the process.
      address: where it serves.
      job: of which it would be a task.
    """
    return frame(
        join_request=pb.JoinRequest(
            job=job,
            incarnation=incarnation,
            jgraph=installed_version("jgraph"),
            task=task,
            address=address,
        )
    )


def arrangement_in(message: pb.Members) -> Arrangement:
    """Returns the arrangement that came.

    Raises:
      JGError: an address, or a name, is none; nobody is in it.
    """
    members: dict[TaskName, Member] = {}
    with reading("the members of a cluster"):
        if message.arrangement and not message.members:
            raise ValueError(f"arrangement {message.arrangement} of nobody")
        for row in message.members:
            split_address(row.address)
            if DeviceSpec.from_string(row.task).task_name != row.task:
                raise ValueError(row.task)
            members[TaskName(row.task)] = Member(
                row.address, row.incarnation, row.leaves
            )
    return Arrangement(message.arrangement, members)

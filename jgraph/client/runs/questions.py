"""Questions of a run's master to the client that began the run, and their answers."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

from jgraph.client.connection import Connection
from jgraph.cluster.loop_messages import Homes, homes_in
from jgraph.errors import JGError
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.status import to_status
from jgraph.rpc.transport import Address


@final
@dataclass(slots=True)
class Question:
    """What the master asks; see ``RunQuestion`` of the protocol.

    Attributes:
      kind: "halted", "rest", "newest", "state", "part", "data", "waits", "rescaled",
        "moved" or "finish".
      position: where in the data the run is; None: it is not said.
      tasks: that it is about.
      what: is waited for.
      ps: on how many the variables lie.
      homes: who has the parts of owners that are away, the how many-th time.
    """

    cluster: Connection
    master: Address
    run: str
    number: int
    kind: str
    position: Mapping[str, Any] | None
    tasks: tuple[TaskName, ...]
    what: str
    ps: int = 0
    homes: Homes = (0, {})
    is_answered: bool = field(init=False, default=False)

    def answer(
        self,
        *,
        step: int | None = None,
        position: Mapping[str, Any] | None = None,
        error: JGError | None = None,
    ) -> bool:
        """Answers, once; returns whether loops that stood still did until now.

        A master that is lost meanwhile has no use for the answer.

        Args:
          step: of a checkpoint.
          position: of a checkpoint.
          error: why it is not done.
        """
        if self.is_answered:
            return False
        self.is_answered = True
        answer = pb.RunAnswer(run=self.run, number=self.number, step=step)
        if position is not None:
            answer.position = json.dumps(position)
        if error is not None:
            answer.error.CopyFrom(to_status(error))
        try:
            request = frame(run_answer=answer)
            reply = self.cluster.call("Master.AnswerRun", request, to=self.master)
        except JGError:
            return False
        return bool(body_of(reply).stood)


def question_in(
    cluster: Connection, master: Address, run: str, report: pb.LoopReport
) -> Question:
    """Returns the question that a report is."""
    question = report.question
    return Question(
        *(cluster, master, run, question.number, question.kind),
        position=json.loads(question.position) if question.position else None,
        tasks=tuple(map(TaskName, question.tasks)),
        what=question.what,
        ps=question.ps,
        homes=homes_in(question.homes),
    )

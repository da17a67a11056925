"""The client of a run: how long it may be gone, and what it is asked."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from jgraph.errors import JGError, TaskLostError, TaskMissingError
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of
from jgraph.rpc.status import to_status
from jgraph.server.runs.journal import Journal
from jgraph.server.runs.run_client import Restarters, RunClient
from tests.support.loop_orders import PS, WORKER, SetClock
from tests.support.run_async import run_async


def client_of(lease_s: float, gone: Callable[[], None] = lambda: None) -> RunClient:
    """The client of a run that may be gone for so long."""
    order = pb.OpenRun(run="r", client=pb.RunClient(lease_s=lease_s))
    return RunClient(order, Journal(TaskName(PS), order, SetClock()), gone)


async def first_question(client: RunClient) -> pb.RunQuestion:
    """What the client is asked that follows the run."""
    reports = client.record.reports(client.waits)
    question: pb.RunQuestion = body_of(await anext(reports)).question
    await reports.aclose()  # type: ignore[attr-defined]
    return question


def test_run_whose_client_never_comes_is_told_so_after_its_lease() -> None:
    async def main() -> None:
        gone = asyncio.Event()
        client = client_of(0.01, gone.set)
        client.begin()
        await gone.wait()
        assert client.is_gone
        with pytest.raises(TaskLostError, match="the client of run 'r' is gone"):
            await client.ask("newest")

    run_async(main(), timeout_s=20)


def test_client_that_follows_its_run_is_not_gone_and_one_that_left_is() -> None:
    async def main() -> None:
        gone = asyncio.Event()
        client = client_of(0.01, gone.set)
        client.begin()
        with client.watching():
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(gone.wait(), 0.1)
            asked = asyncio.ensure_future(client.ask("newest"))
            await first_question(client)
        await gone.wait()
        with pytest.raises(TaskLostError):  # nobody will answer
            await asked

    run_async(main(), timeout_s=20)


def test_question_is_asked_again_until_it_is_answered_and_not_after() -> None:
    async def main() -> None:
        client = client_of(60.0)
        asked = asyncio.ensure_future(client.ask("newest", tasks=[WORKER]))
        question = await first_question(client)
        assert (question.kind, list(question.tasks)) == ("newest", [WORKER])
        assert await first_question(client) == question  # to who comes again
        told = pb.RunAnswer(run="r", number=question.number, step=30)
        await client.answer(told)
        assert (await asked).step == 30
        assert not client.waits(question.number)
        await client.answer(told)  # once more says nothing
        client.close()

    run_async(main(), timeout_s=20)


def test_answer_that_is_an_error_is_raised_where_it_was_asked_for() -> None:
    async def main() -> None:
        client = client_of(60.0)
        asked = asyncio.ensure_future(client.ask("data", tasks=[WORKER]))
        question = await first_question(client)
        refused = to_status(TaskMissingError("nobody starts it"))
        await client.answer(pb.RunAnswer(number=question.number, error=refused))
        with pytest.raises(TaskMissingError, match="nobody starts it"):
            await asked
        client.close()

    run_async(main(), timeout_s=20)


@pytest.mark.parametrize("stood", [True, False])
def test_who_answers_that_loops_may_go_on_is_told_whether_they_stood_still(
    stood: bool,
) -> None:
    async def main() -> None:
        went_on = list[bool]()

        async def go_on() -> bool:
            went_on.append(stood)
            return stood

        act: Callable[[], Awaitable[bool]] = go_on
        client = client_of(60.0)
        asked = asyncio.ensure_future(client.ask("halted", act=act))
        question = await first_question(client)
        assert not went_on
        answer = await client.answer(pb.RunAnswer(number=question.number))
        assert answer.stood == stood
        await asked
        assert went_on == [stood]
        client.close()

    run_async(main(), timeout_s=20)


def test_that_nobody_starts_a_task_again_is_asked_once_and_learned() -> None:
    async def main() -> None:
        client = client_of(60.0)
        restarters = Restarters(client)
        learned = list[JGError]()
        while not learned:
            if (error := restarters.learned([WORKER], "a worker")) is not None:
                learned.append(error)
                continue
            question = await first_question(client) if client.is_asked else None
            if question is not None:
                assert (question.kind, question.what) == ("waits", "a worker")
                refused = to_status(TaskMissingError("it has ended"))
                answer = pb.RunAnswer(number=question.number, error=refused)
                await client.answer(answer)
            await asyncio.sleep(0)
        assert "it has ended" in learned[0].message
        assert client.record.frames == 1
        restarters.close()
        assert not restarters.is_asked
        client.close()

    run_async(main(), timeout_s=20)

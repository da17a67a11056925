"""Who is at an address now; connections of before lead to who was there then."""

import pytest

from jgraph.errors import ClusterUnreachableError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.grpc.transport import GrpcTransport
from jgraph.rpc.serving import HELLO_METHOD
from jgraph.testing.tcp_proxy import TcpProxy
from jgraph.testing.transport_harness import PS, WAIT_S, Recorder
from tests.support.run_async import run_async

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.mark.row(17)
def test_a_task_learns_that_another_process_has_its_address() -> None:
    async def main() -> None:
        old, new = (GrpcTransport(PS, incarnation=one) for one in (7, 8))
        async with TcpProxy(await old.start(Recorder())) as proxy:

            async def asked_before() -> int:
                request = frame(call=pb.Call(method=HELLO_METHOD))
                reply = await old.ask(
                    proxy.address, HELLO_METHOD, request, timeout_s=WAIT_S
                )
                return int(body_of(reply).incarnation)

            async def found() -> tuple[str, int]:
                theirs = await old.who_is_at(proxy.address, WAIT_S)
                return theirs.task, theirs.incarnation

            assert await asked_before() == 7
            assert await found() == (PS, 7)
            proxy.lead_to(await new.start(Recorder()))
            assert await asked_before() == 7
            assert await found() == (PS, 8)
            await new.close()
            with pytest.raises(ClusterUnreachableError, match="no jgraph server"):
                await found()
        await old.close()

    run_async(main())

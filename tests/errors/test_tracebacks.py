"""Errors show the user's lines and one of ours."""

import asyncio
import re
import traceback
from collections.abc import Callable

import jax.numpy as jnp
import pytest

import jgraph as jg
from jgraph.errors import ConfigError, InternalError, JGError
from jgraph.errors.tracebacks import FULL, short_traceback
from jgraph.view import markup


def frames_of(fn: Callable[[], object]) -> list[str]:
    """Names of the functions that the traceback of ``fn`` shows, outermost first."""
    with pytest.raises(JGError) as caught:
        fn()
    return [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


def test_a_call_that_finds_no_server_shows_the_call_and_nothing_of_its_inside() -> None:
    def users() -> None:
        jg.connect("localhost:1", timeout_s=0.1)

    shown = frames_of(users)
    assert shown[-2:] == ["users", "connect"]
    assert shown.count("connect") == 1


def test_all_frames_are_shown_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FULL, "full")
    shown = frames_of(lambda: jg.connect("localhost:1", timeout_s=0.1))
    assert len(shown) > 4
    assert "open_channel" in shown


def test_the_line_of_a_traced_function_stays() -> None:
    def traced(x: object) -> object:
        with jg.device("/job:worker/task:x"):
            return jnp.sin(x)  # type: ignore[arg-type]

    server = jg.Server({"worker": ["localhost:0"]})
    with jg.connect(server.target) as cluster, cluster.session() as session:
        shown = frames_of(lambda: session.run(traced, 1.0))
    server.stop()
    assert shown[-2:] == ["run", "traced"]


async def _of_asyncio() -> None:
    await asyncio.wait([])


def test_a_cause_is_shown_if_it_is_the_users() -> None:
    @short_traceback
    def public(cause: Callable[[], object]) -> None:
        try:
            cause()
        except ValueError as error:
            raise ConfigError("it did not work") from error

    with pytest.raises(ConfigError) as caught:
        public(lambda: int("no number"))
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(ConfigError) as caught:
        public(lambda: asyncio.run(_of_asyncio()))
    assert caught.value.__suppress_context__


def test_the_decorated_function_keeps_its_name_and_result() -> None:
    @short_traceback
    def twice(x: int) -> int:
        """Doubles."""
        return 2 * x

    assert (twice(2), twice.__name__, twice.__doc__) == (4, "twice", "Doubles.")


def test_an_assertion_of_ours_is_an_internal_error_that_says_what_to_report() -> None:
    with pytest.raises(InternalError, match="please report it with") as caught:
        short_traceback(markup.data)("no dataclass")
    line = r"the assertion at jgraph/view/markup.py:\d+ failed: a fault of jgraph"
    assert re.search(line, str(caught.value))


def test_an_assertion_of_the_users_stays_what_it_is() -> None:
    def users() -> None:
        assert jnp.ones(()) == 2, "two"

    with pytest.raises(AssertionError, match="two"):
        short_traceback(users)()

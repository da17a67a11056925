import functools
import gc
import threading
import weakref
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from jgraph.client.cluster import Cluster, connect, open_cluster
from jgraph.client.session import Session
from jgraph.cluster import event_loop
from jgraph.errors import (
    ConfigError,
    DeviceSpecError,
    FeedError,
    FetchError,
    NonFiniteError,
    UninitializedError,
    UnknownDeviceError,
    VariableMismatchError,
)
from jgraph.graph.device import TaskName, device
from jgraph.graph.tracing.function import function
from jgraph.graph.variable import Variable
from jgraph.rpc.security.token import find_token
from tests.support.servers import Servers
from tests.support.waiting import wait_until


def test_function_runs_over_two_tasks_and_keeps_its_state(session: Session) -> None:
    w = Variable("w", jnp.ones((4, 3)), device="/job:ps/task:0")

    @function
    def step(x: Any) -> Any:
        with device("/job:worker/task:0"):
            h = jnp.tanh(x @ w[...])
        w[...] = w[...] + 1
        with device("/job:worker/task:1"):
            return h.sum()

    x = np.ones((2, 4), np.float32)
    assert session.run(step, x) == pytest.approx(6 * np.tanh(4), rel=1e-6)
    assert session.run(step, x) == pytest.approx(6 * np.tanh(8), rel=1e-6)
    assert session.read([w])["w"].tolist() == np.full((4, 3), 3.0).tolist()


def test_results_keep_their_structure_and_dtypes(session: Session) -> None:
    @function
    def f(batch: dict[str, Any], scale: float) -> dict[str, Any]:
        with device("/job:worker/task:1"):
            return {
                "bf16": batch["x"].astype(jnp.bfloat16) * scale,
                "nested": (batch["i"] > 1, [batch["i"]]),
            }

    batch = {"x": np.ones(2, np.float32), "i": np.array([1, 2], np.int32)}
    result = session.run(f, batch, 2.0)
    assert result["bf16"].dtype == jnp.bfloat16
    assert result["bf16"].tolist() == [2.0, 2.0]
    assert result["nested"][0].tolist() == [False, True]
    assert result["nested"][1][0].dtype == np.int32


def test_random_keys_cross_tasks_and_come_back_typed(session: Session) -> None:
    def f(key: Any) -> Any:
        with device("/job:worker/task:0"):
            left, right = jax.random.split(key)
        with device("/job:worker/task:1"):
            return right, jax.random.normal(left, (3,))

    key = jax.random.key(7)
    sent, drawn = session.run(f, key)
    left, right = jax.random.split(key)
    assert jax.random.key_data(sent).tolist() == jax.random.key_data(right).tolist()
    np.testing.assert_allclose(drawn, jax.random.normal(left, (3,)), rtol=1e-6)


def test_gradient_of_an_integer_comes_back_as_nothing(session: Session) -> None:
    def f(x: Any, n: Any) -> Any:
        with device("/job:worker/task:1"):
            return jax.grad(lambda x, n: x * n, (0, 1), allow_int=True)(x, n)

    of_number, of_integer = session.run(f, 2.0, np.arange(3)[1])
    assert of_number == 1.0
    assert of_integer.dtype == jax.dtypes.float0


def test_chosen_fetches_are_all_that_is_computed(session: Session) -> None:
    w = Variable("never_set", ((2,), jnp.float32, None), device="/job:ps/task:0")

    @function
    def f(x: Any) -> dict[str, Any]:
        return {"sum": x.sum(), "product": (x * w[...]).sum()}

    x = np.ones(2, np.float32)
    assert session.run(f, x, fetches={"total": ["sum"]}) == {"total": [2.0]}
    with pytest.raises(UninitializedError, match="'never_set' on /job:ps/task:0"):
        session.run(f, x)
    with pytest.raises(FetchError, match=r"Did you mean \['sum'\]\?"):
        session.run(f, x, fetches="sun")


def test_single_argument_can_be_fed_by_its_name(session: Session) -> None:
    @function
    def f(batch: dict[str, Any]) -> Any:
        return batch["image"] * 2

    batch = {"image": np.ones(2, np.float32)}
    image = np.full(2, 5, np.float32)
    assert session.run(f, batch, feeds={"batch['image']": image}).tolist() == [10, 10]
    with pytest.raises(FeedError, match=r"called batch\['imag'\]; did you mean"):
        session.run(f, batch, feeds={"batch['imag']": image})
    with pytest.raises(
        FeedError, match=r"is float64\[3\]; this step wants float32\[2\]"
    ):
        session.run(f, batch, feeds={"batch['image']": np.zeros(3)})


def test_nan_in_a_feed_is_refused_when_asked_to_check(session: Session) -> None:
    def f(x: Any) -> Any:
        return x + 1

    x = np.array([1, np.nan, np.inf], np.float32)
    assert np.isnan(session.run(f, x)[1])
    with pytest.raises(NonFiniteError, match="argument x of 'f' has 2 of 3 values"):
        session.run(f, x, check_finite=True)
    with pytest.raises(ConfigError, match="check_finite is 'no'; give True or False"):
        session.run(f, x, check_finite="no")  # type: ignore[arg-type]


def test_second_session_shares_variables_by_name(cluster: Cluster) -> None:
    first = Variable("shared", jnp.zeros(2), device="/job:ps/task:1")
    cluster.session().write({first: np.full(2, 7, np.float32)})
    again = Variable("shared", jnp.zeros(2), device="/job:ps")
    assert cluster.session().run(lambda: again[...] + 0).tolist() == [7, 7]


def test_of_two_sessions_that_make_a_variable_the_second_undoes_no_update(
    cluster: Cluster,
) -> None:
    first, second = cluster.session(), cluster.session()

    def count(value: Any) -> Any:
        n = Variable("n", value, device="/job:ps/task:0")

        def step() -> Any:
            n[...] = n[...] + 1
            return n[...]

        return step

    other = count(jnp.zeros(()))

    def late(shape: tuple[int, ...], dtype: Any) -> Any:
        """Is asked for once the second session has found that there is none."""
        step = threading.Thread(target=first.run, args=(other,))
        step.start()
        step.join()
        return jnp.zeros(shape, dtype)

    assert second.run(count(((), "float32", late))) == 2.0


def test_variables_of_a_job_are_spread_by_size(session: Session) -> None:
    sizes = {"a": 10, "b": 6, "c": 5}
    variables = [Variable(n, jnp.zeros(s), device="/job:ps") for n, s in sizes.items()]
    assert session.variable_tasks(variables) == {
        ("", "a"): "/job:ps/task:0",
        ("", "b"): "/job:ps/task:1",
        ("", "c"): "/job:ps/task:1",
    }


def test_init_function_runs_on_the_task_that_holds_the_variable(
    session: Session, cluster: Cluster
) -> None:
    table = Variable("table", ((100, 8), jnp.float32, jnp.ones), device="/job:ps")
    session.initialize([table])
    session.write({table: np.zeros((100, 8), np.float32)})
    session.initialize([table])  # has a value: nothing happens
    assert session.read([table])["table"].sum() == 0
    session.initialize([table], again=True)
    assert session.read([table])["table"].sum() == 800
    status = cluster.status()
    assert status.tasks[0].variable_bytes == 3200
    ways = {way for task in status.tasks for way in task.ways.values()}
    assert ways
    assert ways <= {"shared memory", "local socket", "data socket (plain)"}
    assert all(way in str(status) for way in ways)


def test_name_reused_with_another_shape_is_refused(session: Session) -> None:
    session.write({Variable("w", jnp.zeros(3)): np.zeros(3, np.float32)})
    other = Variable("w", jnp.zeros((3, 2)))
    with pytest.raises(
        VariableMismatchError, match=r"float32\[3,2\] here.*float32\[3\]"
    ):
        session.run(lambda: other[...])
    elsewhere = Variable("w", jnp.zeros(3), device="/job:worker/task:1")
    with pytest.raises(VariableMismatchError, match="asked to live on /job:worker"):
        session.run(lambda: elsewhere[...] + 1)


def test_unknown_device_is_named_before_anything_runs(session: Session) -> None:
    def f(x: Any) -> Any:
        with device("/job:worker/task:9"):
            return x + 1

    with pytest.raises(UnknownDeviceError, match="/job:worker/task:9"):
        session.run(f, 1.0)
    with pytest.raises(DeviceSpecError):
        session.run(lambda x: device("/jub:ps").__enter__(), 1.0)


def test_second_run_registers_and_compiles_nothing(
    session: Session, cluster: Cluster
) -> None:
    @function
    def f(x: Any) -> Any:
        return jnp.sin(x)

    session.run(f, 1.0)
    before = [(t.compilations, list(t.programs)) for t in cluster.status().tasks]
    session.run(f, 2.0)
    after = [(t.compilations, list(t.programs)) for t in cluster.status().tasks]
    assert before == after
    other = cluster.session()
    other.run(f, 3.0)
    assert [t.compilations for t in cluster.status().tasks] == [n for n, _ in before]


def test_closed_session_says_how_to_go_on(cluster: Cluster) -> None:
    session, other = cluster.session(), cluster.session()
    call = session.make_callable(lambda x: x + 1, 1.0)
    step = function(lambda x: x + 2)
    assert (call(1.0), other.run(step, 1.0)) == (2.0, 3.0)
    session.close()
    with pytest.raises(ConfigError, match="session is closed"):
        session.run(step, 1.0)
    with pytest.raises(ConfigError, match="session is closed"):
        call(1.0)
    other.close()
    assert all(not t.programs for t in cluster.status().tasks)


def test_a_session_that_is_dropped_gives_its_programs_back(cluster: Cluster) -> None:
    def programs() -> list[str]:
        return [name for task in cluster.status().tasks for name in task.programs]

    session = cluster.session()
    call = session.make_callable(lambda x: x + 1, 1.0)
    session.run(lambda x: x + 2, 1.0)
    del session
    gc.collect()
    assert call(2.0) == 3.0  # who has a callable has its session
    assert programs()
    del call
    gc.collect()
    wait_until(lambda: not programs())


def test_closed_session_keeps_nothing_of_its_functions(cluster: Cluster) -> None:
    def add(x: Any) -> Any:
        return x + held

    held = np.ones(3)
    with cluster.session() as session:
        session.run(add, 1.0)
    left = weakref.ref(add)
    del add, session
    gc.collect()
    assert left() is None


def test_large_arrays_pass_whole(session: Session) -> None:
    x = np.random.default_rng(0).normal(size=(1 << 21,)).astype(np.float32)

    def f(x: Any) -> Any:
        with device("/job:ps/task:1"):
            return x * 2

    np.testing.assert_array_equal(session.run(f, x), x * 2)


def test_what_is_no_function_is_not_run(session: Session) -> None:
    w = Variable("w", jnp.ones(3), device="/job:ps/task:0")
    with pytest.raises(ConfigError, match=r"session\.read\(\[w\]\)\['w'\]"):
        session.run(w)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="takes a function, not 3"):
        session.run(3)  # type: ignore[arg-type]
    for timeout_s in (0, float("nan"), "10"):
        with pytest.raises(ConfigError, match=f"timeout_s is {timeout_s!r}"):
            session.run(lambda x: x, 1.0, timeout_s=timeout_s)  # type: ignore[arg-type]


@pytest.mark.parametrize("feeds", [["x"], "x", 5, {1: 2.0}, np.ones(1)])
def test_feeds_without_names_are_refused(session: Session, feeds: Any) -> None:
    call = session.make_callable(lambda x: x, 1.0)
    for run in (functools.partial(session.run, lambda x: x), call):
        with pytest.raises(FeedError, match=r"feeds is .*feeds=\{'x': array\}"):
            run(1.0, feeds=feeds)


@pytest.mark.parametrize("feeds", ["x", 5, [None]])
def test_feeds_of_a_callable_are_names(session: Session, feeds: Any) -> None:
    with pytest.raises(FeedError, match=r"give names, feeds=\['x'\]"):
        session.make_callable(lambda x: x, 1.0, feeds=feeds)


def test_container_that_is_no_name_is_refused(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="container is 5; give a name"):
        cluster.session(container=5)  # type: ignore[arg-type]


def test_argument_that_is_called_like_an_option_is_given_by_position(
    session: Session,
) -> None:
    def scale(x: Any, timeout_s: Any) -> Any:
        return x * timeout_s

    assert session.run(scale, 2.0, 3.0, timeout_s=30) == 6.0
    unclear: list[dict[str, Any]] = [{"timeout_s": 3.0}, {}]
    for options in unclear:
        with pytest.raises(ConfigError, match="scale has a parameter 'timeout_s'"):
            session.run(scale, 2.0, **options)


def test_arguments_by_name_and_by_position_are_one_step(
    session: Session, cluster: Cluster
) -> None:
    @function
    def power(base: Any, exponent: Any = 2.0) -> Any:
        return base**exponent

    assert session.run(power, 2.0, 3.0) == 8
    before = [(t.compilations, list(t.programs)) for t in cluster.status().tasks]
    assert session.run(power, base=2.0, exponent=3.0) == 8
    assert session.run(power, 2.0, exponent=3.0) == 8
    assert before == [
        (t.compilations, list(t.programs)) for t in cluster.status().tasks
    ]
    assert session.run(power, exponent=3.0, base=1.0) == 1
    assert session.run(power, base=3.0) == 9


def test_step_called_outside_a_session_is_told_who_runs_it() -> None:
    w = Variable("w", jnp.ones(3))

    @function
    def step() -> Any:
        return w[...].sum()

    with pytest.raises(UninitializedError, match=r"run it: sess\.run\(step, …\)"):
        step()


def test_variables_are_given_as_objects_alone_or_in_a_list(session: Session) -> None:
    w = Variable("w", jnp.ones(3), device="ps:0")
    session.initialize(w)
    assert session.read(w)["w"].tolist() == session.read([w])["w"].tolist() == [1] * 3
    assert session.snapshot(w)["w"].tolist() == [1] * 3
    with pytest.raises(ConfigError, match=r"jg\.Variable objects, not 'w'"):
        session.read(["w"])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match=r"jg\.Variable objects, not 'w'"):
        session.write({"w": np.ones(3)})  # type: ignore[dict-item]


def test_python_numbers_are_written_in_the_variables_type(session: Session) -> None:
    w = Variable("w", jnp.ones(3), device="/job:ps/task:0")
    session.write({w: [1, 2, 3]})
    assert session.read([w])["w"].tolist() == [1, 2, 3]
    session.write({w: 0})
    assert session.read([w])["w"].tolist() == [0, 0, 0]
    with pytest.raises(VariableMismatchError, match=r"'w' is float32\[3\].*int64\[3\]"):
        session.write({w: np.arange(3)})
    small = Variable("small", jnp.zeros(3, jnp.uint8))
    with pytest.raises(VariableMismatchError, match=r"0 to 255, and .* -1 to 300"):
        session.write({small: [300, -1, 2]})


def test_variable_without_init_function_is_told_to_be_written(session: Session) -> None:
    v = Variable("bare", ((3,), jnp.float32, None), device="/job:ps/task:0")
    with pytest.raises(UninitializedError, match=r"session\.write\({bare: array}\)"):
        session.initialize([v])
    session.write({v: np.ones(3, np.float32)})
    session.initialize([v])  # has a value now


def test_device_that_the_task_has_not_is_refused(session: Session) -> None:
    def on(place: str) -> Any:
        def step(x: Any) -> Any:
            with device(place):
                return jnp.sin(x)

        return step

    for missing in ("/job:worker/task:0/gpu:0", "/job:ps/task:0/cpu:3", "/tpu:*"):
        with pytest.raises(UnknownDeviceError, match="first of its cpu devices"):
            session.run(on(missing), 1.0)
    assert session.run(on("/job:worker/task:0/cpu:0"), 0.0) == 0.0


def test_soft_placement_takes_the_device_that_the_task_has(cluster: Cluster) -> None:
    def step(x: Any) -> Any:
        with device("/job:worker/task:1/gpu:0"):
            return jnp.sin(x)

    with pytest.raises(UnknownDeviceError, match=r"(?s)soft_placement=True.* sin x"):
        cluster.session().run(step, 1.0)
    soft = cluster.session(soft_placement=True)
    assert soft.run(step, 0.0) == 0.0
    assert "/job:worker/task:1" in {s.task for s in soft.plan(step, 0.0).segments}


def test_closed_cluster_opens_no_session_and_its_sessions_run_nothing(
    servers: Servers,
) -> None:
    cluster = connect(servers.servers[0].target, timeout_s=20)
    session, step = cluster.session(), function(lambda x: x + 1)
    session.run(step, 1.0)
    cluster.close()
    with pytest.raises(ConfigError, match=r"closed; connect again with jg\.connect"):
        cluster.session()
    with pytest.raises(ConfigError, match=r"closed; connect again with jg\.connect"):
        session.run(step, 1.0)


def test_address_that_is_no_text_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"not 8470; write .*jgraph://"):
        connect(8470)  # type: ignore[arg-type]


def test_code_for_two_kinds_of_device_runs_on_the_one_there_is(
    cluster: Cluster,
) -> None:
    both = cluster.session(platforms=("cpu", "cuda"))
    step = both.make_callable(lambda x: jnp.sort(x) + 1, np.ones(3, np.float32))
    codes = step.plan.program.segments
    assert {code.platforms for code in codes} == {("cpu", "cuda")}
    for code in codes:
        exported = jax.export.deserialize(bytearray(code.exported))
        assert exported.platforms == ("cpu", "cuda")
    assert step(np.array([2, 1, 3], np.float32)).tolist() == [2, 3, 4]
    for wrong in ("cuda", ["gpu"]):
        with pytest.raises(ConfigError, match="cpu, cuda, rocm, tpu"):
            cluster.session(platforms=wrong)


def test_a_task_that_did_not_answer_gets_code_for_cpu_and_cuda(
    servers: Servers,
) -> None:
    address = servers.servers[0].target.removeprefix("jgraph://")
    transport, reply = event_loop.run(open_cluster(address, 20, find_token()))
    del reply.tasks[:]
    with Cluster(address, transport, reply) as cluster:
        planned = cluster.session().plan(jnp.sort, np.ones(3, np.float32))
        assert {c.platforms for c in planned.program.segments} == {("cpu", "cuda")}


def test_worker_with_a_gpu_gets_code_for_cuda(servers: Servers) -> None:
    address = servers.servers[0].target.removeprefix("jgraph://")
    transport, reply = event_loop.run(open_cluster(address, 20, find_token()))
    for task in reply.tasks:
        task.platform = "cuda"
    with Cluster(address, transport, reply) as cluster:
        planned = cluster.session().plan(jnp.sort, np.ones(3, np.float32))
        assert {c.platforms for c in planned.program.segments} == {("cuda",)}


def test_a_large_variable_is_asked_of_the_task_that_has_it(
    session: Session, cluster: Cluster
) -> None:
    value = np.arange(5 << 20, dtype=np.float32)  # 20 MB
    w = Variable("w", value, device="/job:ps/task:1")
    session.initialize(w)

    def asked() -> dict[str, int]:
        return {
            task.task: sum(sum(c.buckets) for c in task.calls if c.method == "RunStep")
            for task in cluster.status().tasks
        }

    before = asked()
    assert (session.read(w)["w"] == value).all()
    more = {task: count - before[task] for task, count in asked().items()}
    assert {task for task, count in more.items() if count} == {"/job:ps/task:1"}


def test_of_programs_that_are_not_all_taken_no_task_keeps_one(
    cluster: Cluster, session: Session
) -> None:
    def half(x: Any) -> Any:
        with device("/job:worker/task:1"):
            return x / 2

    program = session.plan(half, np.float32(3)).program
    nowhere = program.rename_task(program.driver, TaskName("/job:worker/task:7"))
    with pytest.raises(UnknownDeviceError, match="no /job:worker/task:7"):
        session.register_all([program, nowhere])
    assert not any("half" in p for t in cluster.status().tasks for p in t.programs)
    assert len(session.register_all([program])) == 1

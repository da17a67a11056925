"""Device strings: the grammar and the merging of TensorFlow's DeviceSpec."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, strategies as st

from jgraph import _compat
from jgraph.errors import DeviceSpecError
from jgraph.graph.device import (
    DeviceSpec,
    as_spec,
    current_device,
    device,
    stamp_of,
)

SPECS = st.builds(
    lambda job, replica, task, kind, index: DeviceSpec(
        job, replica, task, kind, index if kind else None
    ),
    job=st.none() | st.sampled_from(["ps", "worker", "a_1"]),
    replica=st.none() | st.integers(0, 9),
    task=st.none() | st.integers(0, 99),
    kind=st.none() | st.sampled_from(["CPU", "GPU", "TPU"]),
    index=st.none() | st.integers(0, 9),
)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("", ""),
        ("/", ""),
        ("/job:ps", "/job:ps"),
        ("job:ps", "/job:ps"),
        ("/job:ps/task:3", "/job:ps/task:3"),
        ("/task:3/job:ps", "/job:ps/task:3"),
        ("/job:ps/replica:0/task:1/device:CPU:0", None),
        ("/cpu:0", "/device:CPU:0"),
        ("/CPU:0", "/device:CPU:0"),
        ("/gpu:*", "/device:GPU:*"),
        ("/gpu", "/device:GPU:*"),
        ("/device:gpu:2", "/device:GPU:2"),
        ("/device:TPU:1", "/device:TPU:1"),
        ("/device:CPU", "/device:CPU:*"),
        ("/device:CPU:*/job:ps", "/job:ps/device:CPU:*"),
        ("/task:*", ""),
        ("/job:*/task:1", "/task:1"),
        ("/job:ps/task:007", "/job:ps/task:7"),
        ("ps:0", "/job:ps/task:0"),
        ("worker:12", "/job:worker/task:12"),
        ("gpu:1", "/device:GPU:1"),
    ],
)
def test_device_string_reads_as_tensorflow_reads_it(
    text: str, canonical: str | None
) -> None:
    assert str(DeviceSpec.from_string(text)) == (
        text if canonical is None else canonical
    )


@pytest.mark.parametrize(
    "text",
    [
        "/ps:0",
        "/job:",
        "/job:1ps",
        "/job:my-ps",
        "/job:ps/task:one",
        "/job:ps/task:-1",
        "/job:ps/task:",
        "/task:\N{ARABIC-INDIC DIGIT THREE}",
        "/job:ps/task:0/cpu:0/gpu:1",
        "/job:ps/job:worker",
        "/task:0/task:0",
        "/device:CPU:x",
        "/device::0",
        "/cpu:0:1",
        " /job:ps",
        "/job:ps\n",
        "localhost:2222",
    ],
)
def test_what_is_no_device_string_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(DeviceSpecError, match="for example '/job:worker/task:0"):
        DeviceSpec.from_string(text)


@pytest.mark.parametrize(
    "value", [3, lambda op: "/cpu:0", DeviceSpec(job="a b"), DeviceSpec(task=-1)]
)
def test_what_is_no_device_is_refused_by_name(value: object) -> None:
    with pytest.raises(DeviceSpecError, match="is not a device"):
        as_spec(value)


@given(SPECS)
def test_printing_and_reading_gives_the_same_spec(spec: DeviceSpec) -> None:
    assert DeviceSpec.from_string(str(spec)) == spec


@given(SPECS, SPECS, SPECS)
def test_merging_is_associative_and_inner_wins(
    a: DeviceSpec, b: DeviceSpec, c: DeviceSpec
) -> None:
    assert a.merge(b).merge(c) == a.merge(b.merge(c))
    assert a.merge(DeviceSpec()) == a
    assert DeviceSpec().merge(a) == a
    merged = a.merge(b)
    assert merged.task == (a.task if b.task is None else b.task)


@pytest.mark.parametrize(
    ("outer", "inner", "merged"),
    [
        ("/job:worker", "/task:1", "/job:worker/task:1"),
        ("/job:worker/task:0", "/task:1", "/job:worker/task:1"),
        ("/job:ps/task:1", "/job:worker", "/job:worker/task:1"),
        ("/gpu:1", "/cpu:0", "/device:CPU:0"),
        ("/gpu:1", "/gpu:*", "/device:GPU:*"),
        ("/gpu:1", "/cpu:*", "/device:CPU:*"),
        ("/gpu:1", "", "/device:GPU:1"),
        ("/job:train/cpu:0", "/gpu:1", "/job:train/device:GPU:1"),
    ],
)
def test_inner_scope_wins_field_by_field(outer: str, inner: str, merged: str) -> None:
    with device(outer), device(inner):
        assert str(current_device()) == merged
    assert not current_device()


def test_none_clears_the_outer_scopes() -> None:
    with device("/job:ps/task:1"):
        with device(None), device("/cpu:0"):
            assert str(current_device()) == "/device:CPU:0"
        assert str(current_device()) == "/job:ps/task:1"


def test_scope_ends_when_its_code_raises() -> None:
    with pytest.raises(ZeroDivisionError), device("/job:ps"):
        _ = 1 // 0
    assert not current_device()


def test_a_scope_may_be_used_again_and_inside_itself() -> None:
    there: Any = device("/job:worker")
    for _ in range(2):
        with there, device("/task:1"):
            assert str(current_device()) == "/job:worker/task:1"
            with there:
                assert str(current_device()) == "/job:worker/task:1"
            assert there(current_device)() == current_device()  # as a decorator, too
        assert not current_device()


@given(st.lists(SPECS | st.none(), max_size=4))
def test_stamp_of_an_equation_is_the_merge_of_its_scopes(
    scopes: list[DeviceSpec | None],
) -> None:
    def nested(x: jax.Array, rest: list[DeviceSpec | None]) -> jax.Array:
        if not rest:
            return jnp.negative(x)
        with device(rest[0]):
            return nested(x, rest[1:])

    jaxpr, _, _ = _compat.make_jaxpr(lambda x: nested(x, scopes), 1.0)
    want = DeviceSpec()
    for scope in scopes:
        want = DeviceSpec() if scope is None else want.merge(scope)
    assert stamp_of(_compat.name_stack_of(jaxpr.eqns[0])) == want


def test_scopes_of_the_user_beside_ours_do_not_disturb() -> None:
    def f(x: jax.Array) -> jax.Array:
        theirs, others = jax.named_scope("encoder/job:ps"), jax.named_scope("jgdev<x>")
        with theirs, device("/job:worker"), others, device("/task:2"):
            return jnp.sin(x)

    jaxpr, _, _ = _compat.make_jaxpr(jax.grad(f), 1.0)
    stamps = {str(stamp_of(_compat.name_stack_of(e))) for e in jaxpr.eqns}
    assert stamps == {"/job:worker/task:2"}


@pytest.mark.parametrize("typo", ["/jobs:ps", "gpu0", "/job:ps/task:x"])
def test_typo_in_a_scope_is_refused_where_it_is_written(typo: str) -> None:
    with pytest.raises(DeviceSpecError, match="is not a device field"):
        device(typo)  # not entered

from typing import Any

import pytest
from hypothesis import given, strategies as st

from jgraph.cluster.spec import ClusterSpec
from jgraph.errors import ClusterSpecError, UnknownDeviceError

# The examples of TensorFlow's documentation of ClusterSpec and of its own tests
# (server_lib_test.py, testClusterSpecAccessors).
DENSE = {
    "worker": [
        "worker0.example.com:2222",
        "worker1.example.com:2222",
        "worker2.example.com:2222",
    ],
    "ps": ["ps0.example.com:2222", "ps1.example.com:2222"],
}
SPARSE: dict[str, Any] = {
    "worker": {1: "worker1.example.com:2222"},
    "ps": ["ps0.example.com:2222", "ps1.example.com:2222"],
}
ACCESSORS: dict[str, Any] = {
    "ps": ["ps0:2222", "ps1:2222"],
    "worker": ["worker0:2222", "worker1:2222", "worker2:2222"],
    "sparse": {0: "sparse0:2222", 3: "sparse3:2222"},
}


def refused(make: Any, *args: Any, **kwargs: Any) -> ClusterSpecError:
    with pytest.raises(ClusterSpecError) as caught:
        make(*args, **kwargs)
    return caught.value


# ------------------------------------------------------------ TensorFlow's behaviour


def test_accessors_give_what_tensorflow_gives() -> None:
    spec = ClusterSpec(ACCESSORS)
    assert spec.as_dict() == ACCESSORS
    assert spec.jobs == ["ps", "worker", "sparse"]
    assert [spec.num_tasks(job) for job in spec.jobs] == [2, 3, 2]
    assert spec.task_indices("ps") == [0, 1]
    assert spec.task_indices("sparse") == [0, 3]
    assert spec.task_address("ps", 1) == "ps1:2222"
    assert spec.task_address("sparse", 3) == "sparse3:2222"
    assert spec.job_tasks("worker") == ACCESSORS["worker"]
    assert spec.job_tasks("sparse") == ["sparse0:2222", None, None, "sparse3:2222"]


@pytest.mark.parametrize("cluster", [DENSE, SPARSE, ACCESSORS])
def test_a_spec_is_equal_to_one_made_from_its_other_forms(cluster: Any) -> None:
    spec = ClusterSpec(cluster)
    assert ClusterSpec(spec) == spec
    assert ClusterSpec(spec.as_dict()) == spec
    assert ClusterSpec.from_json(spec.to_json()) == spec
    assert hash(ClusterSpec(spec.as_dict())) == hash(spec)


def test_a_dict_with_all_indices_is_the_list() -> None:
    spec = ClusterSpec({"ps": {1: "ps1:2222", 0: "ps0:2222"}})
    assert spec == ClusterSpec({"ps": ["ps0:2222", "ps1:2222"]})
    assert spec.as_dict() == {"ps": ["ps0:2222", "ps1:2222"]}


def test_order_of_jobs_does_not_matter_for_equality() -> None:
    other = dict(reversed(DENSE.items()))
    assert ClusterSpec(other) == ClusterSpec(DENSE)
    assert ClusterSpec(other).to_json() == ClusterSpec(DENSE).to_json()
    assert hash(ClusterSpec(other)) == hash(ClusterSpec(DENSE))


def test_specs_of_other_tasks_are_not_equal() -> None:
    assert ClusterSpec(DENSE) != ClusterSpec(SPARSE)
    assert ClusterSpec(DENSE) != DENSE


def test_only_the_empty_spec_is_false() -> None:
    assert not ClusterSpec({})
    assert ClusterSpec({}).tasks() == []
    assert ClusterSpec(SPARSE)


def test_json_has_its_jobs_sorted() -> None:
    assert ClusterSpec(SPARSE).to_json() == (
        '{"ps": ["ps0.example.com:2222", "ps1.example.com:2222"], '
        '"worker": {"1": "worker1.example.com:2222"}}'
    )


# ----------------------------------------------------------------- names of tasks


def test_tasks_are_listed_by_job_and_index() -> None:
    assert ClusterSpec(ACCESSORS).tasks() == [
        "/job:ps/task:0",
        "/job:ps/task:1",
        "/job:worker/task:0",
        "/job:worker/task:1",
        "/job:worker/task:2",
        "/job:sparse/task:0",
        "/job:sparse/task:3",
    ]


def test_each_listed_task_has_its_address() -> None:
    spec = ClusterSpec(ACCESSORS)
    addresses = [spec.address(task) for task in spec.tasks()]
    assert addresses == [a for job in spec.jobs for a in spec.job_tasks(job) if a]


def test_address_takes_any_device_string_of_the_task() -> None:
    spec = ClusterSpec(ACCESSORS)
    assert spec.address("/task:3/job:sparse/device:CPU:0") == "sparse3:2222"


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda s: s.num_tasks("wroker"), "did you mean 'worker'? its jobs are: ps,"),
        (lambda s: s.task_indices("gpu"), "no job 'gpu'; its jobs are: ps, worker"),
        (lambda s: s.job_tasks("p"), "no job 'p'; did you mean 'ps'?"),
        (lambda s: s.task_address("unknown", 0), "no job 'unknown'"),
        (lambda s: s.task_address("sparse", 2), "no task 2; its tasks are 0, 3"),
        (lambda s: s.task_address("ps", -1), "no task -1; its tasks are 0, 1"),
        (lambda s: s.address("/job:ps/task:7"), "no task 7; its tasks are 0, 1"),
        (lambda s: s.address("/job:ps"), "does not name one task"),
        (lambda s: s.address(""), "does not name one task"),
        (lambda s: s.address("ps"), "one task of this cluster, which has /job:"),
        (lambda s: s.address("ps:7"), "no task 7; its tasks are 0, 1"),
        (lambda s: s.address(3), "3 does not name one task"),
        (
            lambda s: ClusterSpec({"ps": [f"a:{n}" for n in range(1, 100)]}).address(
                ""
            ),
            "/job:ps/task:7 and 91 more",
        ),
    ],
)
def test_an_unknown_job_or_task_is_named_with_what_there_is(
    ask: Any, message: str
) -> None:
    with pytest.raises(UnknownDeviceError) as caught:
        ask(ClusterSpec(ACCESSORS))
    assert message in str(caught.value)
    assert isinstance(caught.value, LookupError)


def test_an_empty_spec_says_that_it_has_no_jobs() -> None:
    with pytest.raises(UnknownDeviceError, match="its jobs are: none"):
        ClusterSpec({}).num_tasks("ps")


# ------------------------------------------------------------- what cannot be a cluster


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({"ps": []}, "ps has no tasks"),
        ({"ps": {}}, "ps has no tasks"),
        ({"p s": ["a:1"]}, "job name 'p s' must be letters"),
        ({"": ["a:1"]}, "job name '' must be letters"),
        ({"1st": ["a:1"]}, "job name '1st' must be letters"),
        ({"ps\n": ["a:1"]}, "job name 'ps\\n' must be letters"),
        ({3: ["a:1"]}, "job name 3 must be letters"),
        ({"ps": "a:1"}, "ps must be a list of addresses"),
        ({"ps": None}, "ps must be a list of addresses"),
        ({"ps": [5]}, "ps[0] is 5, not a 'host:port' string"),
        ({"ps": {-1: "a:1"}}, "ps[-1] is not a task index"),
        ({"ps": {"x": "a:1"}}, "ps[x] is not a task index"),
        ({"ps": {True: "a:1"}}, "ps[True] is not a task index"),
        ({"ps": {1.0: "a:1"}}, "ps[1.0] is not a task index"),
        ({"ps": {10**7: "a:1"}}, "ps[10000000] is not a task index"),
        ({"ps": {"9" * 5000: "a:1"}}, "is not a task index"),
        ({"ps": {"1": "a:1", "01": "b:1"}}, "ps[1] is listed twice"),
        ({"ps": ["nodeA"]}, "ps[0] is 'nodeA', which has no port; write 'nodeA:8470'"),
        ({"ps": ["nodeA:"]}, "which has no port"),
        ({"ps": [""]}, "which has no port"),
        ({"ps": ["[::1]"]}, "which has no port"),
        ({"ps": [":8470"]}, "which has no host name before ':8470'"),
        ({"ps": ["node A:8470"]}, "has no host name"),
        ({"ps": ["::1:8470"]}, "write an IPv6 host in brackets"),
        ({"ps": ["grpc://nodeA:8470"]}, "without scheme or path"),
        ({"ps": ["nodeA:8470/x"]}, "without scheme or path"),
        ({"ps": ["nodeA:http"]}, "a port is a number from 1 to 65535"),
        ({"ps": ["nodeA:-1"]}, "a port is a number from 1 to 65535"),
        ({"ps": ["nodeA:65536"]}, "a port is a number from 1 to 65535"),
        ({"ps": ["nodeA:" + "9" * 5000]}, "a port is a number from 1 to 65535"),
        ({"ps": ["nodeA:²"]}, "a port is a number from 1 to 65535"),
        ({"ps": ["nodeA:0"]}, "port 0 works only in a local cluster"),
        ({"ps": ["0.0.0.0:8470"]}, "other tasks cannot dial"),
        ({"ps": ["[::]:8470"]}, "other tasks cannot dial"),
        ([("ps", ["a:1"])], "expected a dict"),
        (None, "expected a dict"),
    ],
)
def test_what_cannot_be_a_cluster_is_refused_by_field(
    cluster: Any, message: str
) -> None:
    error = refused(ClusterSpec, cluster)
    assert message in str(error)
    assert str(error).startswith("JG-123 cluster spec: ")


@pytest.mark.parametrize(
    "cluster",
    [
        {"ps": ["[::1]:8470"]},
        {"ps": ["10.0.0.1:1", "10.0.0.1:65535"]},
        {"Job_2": ["ps-0.ps.default.svc.cluster.local:8470"]},
        {"ps": ("a:1", "b:1")},
        {"worker": {"0": "a:1", "12": "b:1"}},
    ],
)
def test_what_can_be_a_cluster_is_taken(cluster: Any) -> None:
    assert ClusterSpec(cluster)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("nodeA:8471", "nodeA:8471"),
        ("nodeA:8471", "NODEa:8471"),
        ("nodeA:8471", "nodeA:08471"),
        ("localhost:8471", "127.0.0.1:8471"),
    ],
)
def test_two_tasks_on_one_address_are_both_named(one: str, other: str) -> None:
    error = refused(ClusterSpec, {"ps": ["x:1", one], "worker": [other]})
    assert f"ps[1] and worker[0] are both {other}" in str(error)


def test_port_zero_is_taken_and_may_repeat_where_it_is_allowed() -> None:
    spec = ClusterSpec({"ps": ["localhost:0", "localhost:0"]}, port_zero=True)
    assert spec.num_tasks("ps") == 2
    assert ClusterSpec(spec) == spec


@pytest.mark.bad_input_row(23)
def test_all_problems_are_told_at_once_and_as_data() -> None:
    error = refused(
        ClusterSpec,
        {"ps": ["nodeA", "nodeB:0"], "w-1": ["c:1"], "chief": [], "a": ["d:1", "d:1"]},
        source="cluster.toml",
    )
    assert str(error).startswith("JG-123 cluster.toml has 5 problems; correct them:")
    assert len(error.details["problems"]) == 5
    assert error.details["source"] == "cluster.toml"
    for number, field in enumerate(("job name 'w-1'", "chief", "ps[0]", "ps[1]"), 1):
        assert f"\n  {number}. {field}" in str(error)
    assert "\n  5. a[0] and a[1] are both d:1" in str(error)


# ----------------------------------------------------------------------- as an object


def test_a_spec_prints_as_what_makes_it() -> None:
    assert repr(ClusterSpec({"ps": ["a:1"]})) == "ClusterSpec({'ps': ['a:1']})"


def test_html_shows_each_task_and_escapes_its_address() -> None:
    text = ClusterSpec({"ps": ["<b>:1"], "worker": {2: "c:1"}})._repr_html_()
    assert "<td>worker</td><td>2</td><td>c:1</td>" in text
    assert "&lt;b&gt;:1" in text
    assert "<b>" not in text


jobs = st.dictionaries(
    st.from_regex(r"[a-zA-Z][a-zA-Z0-9_]{0,8}", fullmatch=True),
    st.sets(st.integers(0, 50), min_size=1, max_size=6),
    max_size=4,
)


@given(jobs)
def test_any_cluster_survives_its_text_forms(indices: dict[str, set[int]]) -> None:
    cluster = {
        job: {i: f"{job}-{n}.example:{i + 1}" for i in tasks}
        for n, (job, tasks) in enumerate(indices.items())
    }
    spec = ClusterSpec(cluster)
    assert {j: set(spec.task_indices(j)) for j in spec.jobs} == indices
    assert ClusterSpec.from_json(spec.to_json()) == spec
    assert ClusterSpec(spec.as_dict()) == spec


@given(st.text(max_size=40))
def test_any_text_as_address_is_taken_or_refused_with_its_field(text: str) -> None:
    try:
        spec = ClusterSpec({"ps": [text]})
    except ClusterSpecError as error:
        told = error.message
    else:
        told = f"ps[0] {spec.task_address('ps', 0) == text}"
    assert told.startswith(("ps[0] True", "cluster spec: ps[0] is "))

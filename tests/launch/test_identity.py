"""Which task a server is, from what launchers set."""

import pytest

from jgraph.cluster.spec import ClusterSpec
from jgraph.errors import ClusterSpecError
from jgraph.launch.identity import task_here

SPEC = ClusterSpec({"ps": ["a:1"], "worker": ["b:1", "c:1"]})
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "jgraph-ps-0"}


def test_what_is_told_wins() -> None:
    environ = {**POD, "JOB_COMPLETION_INDEX": "7", "SLURM_PROCID": "2"}
    assert task_here(SPEC, "worker", 1, environ) == ("worker", 1)


def test_a_pod_of_an_indexed_job_has_its_completion_index() -> None:
    environ = {**POD, "JOB_COMPLETION_INDEX": "1"}
    assert task_here(SPEC, "worker", None, environ) == ("worker", 1)


def test_a_pod_of_a_stateful_set_has_the_ordinal_of_its_name() -> None:
    assert task_here(SPEC, "ps", None, POD) == ("ps", 0)


def test_a_number_at_the_end_of_another_host_says_nothing() -> None:
    assert task_here(SPEC, "worker", None, {"HOSTNAME": "node-1"}) == ("worker", None)


@pytest.mark.parametrize(
    ("rank", "found"), [("0", ("ps", 0)), ("1", ("worker", 0)), ("2", ("worker", 1))]
)
def test_slurm_counts_the_tasks_in_the_order_of_the_file(
    rank: str, found: tuple[str, int]
) -> None:
    assert task_here(SPEC, None, None, {"SLURM_PROCID": rank}) == found


def test_a_process_too_many_says_how_many_to_start() -> None:
    with pytest.raises(ClusterSpecError, match="srun --ntasks=3"):
        task_here(SPEC, None, None, {"SLURM_PROCID": "3"})


def test_nothing_told_is_nothing_known() -> None:
    assert task_here(SPEC, None, None, {}) == (None, None)

"""A ps that is told to leave, and is killed before it has given its variables away."""

from concurrent.futures import ThreadPoolExecutor

from jgraph.launch.local.cluster import LocalCluster
from tests.support.waiting import wait_until


def kill_the_leaver(cluster: LocalCluster, ps: int) -> None:
    """Scales to so many ps, and kills the last one when it was told to leave.

    Returns when the scaling has, which is all the same to it.
    """
    leaver, registrar = f"/job:ps/task:{ps}", "/job:ps/task:0"
    told = f"{leaver} was told to leave the cluster"
    with ThreadPoolExecutor(1) as pool:
        scaling = pool.submit(cluster.scale, ps=ps)
        wait_until(lambda: told in cluster.logs(registrar, tail=50))
        cluster.kill(leaver)
        scaling.result()

"""Collectors of the hosts: who sums what workers of one host send to another host."""

from collections.abc import Mapping, Sequence

from jgraph.graph.ir import TaskName


def collectors(
    owners: Sequence[TaskName],
    workers: Sequence[TaskName],
    hosts: Mapping[TaskName, str],
    least: float = 2,
) -> dict[tuple[str, TaskName], TaskName]:
    """Returns which task of a host sums what its workers send each owner elsewhere.

    These are owners themselves, each of which sums for its share of those elsewhere.

    Args:
      owners: who gets something of every worker.
      workers: who send it.
      hosts: of each task; one that is not named here is on a host of its own.
      least: workers of a host for which that is worth it.

    Returns:
      By host and owner. A host without is one whose workers send all themselves.

    Example:
      >>> a, b, c, d = tasks = [TaskName(name) for name in "abcd"]
      >>> hosts = {a: "one", b: "one", c: "two", d: "three"}
      >>> collectors(tasks, tasks, hosts)
      {('one', 'c'): 'a', ('one', 'd'): 'b'}
    """
    found: dict[tuple[str, TaskName], TaskName] = {}
    for host in dict.fromkeys(hosts[w] for w in workers if w in hosts):
        here = [owner for owner in owners if hosts.get(owner) == host]
        senders = sum(hosts.get(worker) == host for worker in workers)
        if not here or senders < least:
            continue
        away = [owner for owner in owners if hosts.get(owner) != host]
        for number, owner in enumerate(away):
            found[host, owner] = here[number % len(here)]
    return found

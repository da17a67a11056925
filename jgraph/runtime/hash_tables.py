"""Hash-table shards of one task, made on first use."""

import threading
from collections.abc import Collection, Iterator
from typing import final

from jgraph.errors import VariableMismatchError
from jgraph.graph.hash_spec import HashSpec
from jgraph.graph.ir import TaskName
from jgraph.runtime.entry import HashEntry
from jgraph.runtime.hash_shard import HashShard


@final
class HashTables:
    """Shards by (container, name of the table); its user keeps threads apart."""

    def __init__(self, task: TaskName) -> None:
        self._task = task
        self._shards: dict[tuple[str, str], tuple[HashShard, threading.Lock]] = {}

    def __iter__(self) -> Iterator[tuple[str, HashShard]]:
        """Yields (container, shard) of each table."""
        for (container, _), (shard, _) in self._shards.items():
            yield container, shard

    def entry(self, container: str, column: str, spec: HashSpec) -> HashEntry:
        """Returns a column of a table.

        Raises:
          VariableMismatchError: the table is another one here.
          ConfigError: this host cannot have such a table.
        """
        key = container, spec.name
        if key not in self._shards:
            self._shards[key] = HashShard(spec), threading.Lock()
        shard, lock = self._shards[key]
        if shard.spec != spec:
            raise VariableMismatchError(
                f"hash table '{spec.name}' on {self._task} has another budget, policy "
                "or columns than this program says; choose another name, or drop the "
                "old one with cluster.reset()",
                variable=spec.name,
                task=self._task,
            )
        return HashEntry(shard, lock, column)

    def drop(self, containers: Collection[str]) -> int:
        """Forgets the tables of these containers (none named: all)."""
        gone = [key for key in self._shards if not containers or key[0] in containers]
        for key in gone:
            del self._shards[key]
        return len(gone)

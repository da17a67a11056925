"""The rules by which rows of a hash table go, with a dict; a model of such rows."""

from dataclasses import dataclass, field
from typing import Any, final

import jax
import numpy as np
from flax import nnx

import jgraph as jg
from jgraph.graph.rows.hash_keys import join_keys
from jgraph.graph.rows.hash_spec import Column, Eviction, HashSpec
from jgraph.runtime.store.hash_policy import nbytes_for
from jgraph.train.run.run import Run

ROOM, TTL, WORKERS = 5, 2, 2


@final
@dataclass(slots=True)
class Oracle:
    """The rules as the pages state them, with a dict.

    Of rows that are equally old any may go: it looks which ones did.
    """

    eviction: Eviction
    rows: dict[int, int] = field(default_factory=dict)
    """How many updates each row has had."""
    used: dict[int, int] = field(default_factory=dict)
    uses: dict[int, int] = field(default_factory=dict)
    updates: int = 0
    refused: int = 0
    evicted: int = 0
    expired: int = 0
    dropped: int = 0

    def looked_up(self, keys: set[int], left: set[int]) -> None:
        """A step asked for these keys, and then these were there."""
        if self.eviction == "ttl":
            old = [k for k in self.rows if self.used[k] < self.updates - TTL]
            self.expired += len(old)
            self._forget(old)
        for key in keys & self.rows.keys():
            self.used[key] = self.updates
            self.uses[key] += 1
        new = sorted(keys - self.rows.keys())
        may_go = {
            k: (self.uses[k] if self.eviction == "lfu" else 0, self.used[k])
            for k in self.rows
            if self.used[k] < self.updates and self.eviction != "ttl"
        }
        missing = max(0, len(self.rows) + len(new) - ROOM)
        gone = self.rows.keys() - left
        assert len(gone) == min(missing, len(may_go))
        assert gone <= may_go.keys()
        stayed = [score for key, score in may_go.items() if key not in gone]
        assert not gone or not stayed or max(may_go[k] for k in gone) <= min(stayed)
        self.evicted += len(gone)
        self._forget(gone)
        room = ROOM - len(self.rows)
        self.refused += len(new[room:])
        for key in new[:room]:
            self.rows[key], self.used[key], self.uses[key] = 0, self.updates, 1
        assert left == self.rows.keys()

    def updated(self, keys: set[int]) -> None:
        """The gradient of a step came."""
        self.dropped += len(keys - self.rows.keys())
        for key in keys & self.rows.keys():
            self.rows[key] += 1
        self.updates += 1

    def _forget(self, keys: Any) -> None:
        for key in list(keys):
            del self.rows[key], self.used[key], self.uses[key]


BATCH, KEYS = 2, 16


def options(eviction: Eviction, rows: int = ROOM) -> dict[str, Any]:
    """Options of a table with so many rows in each shard."""
    ttl = TTL if eviction == "ttl" else 0
    spec = HashSpec("t", (Column("", 1),), 1 << 20, eviction=eviction, ttl=ttl)
    return {"capacity_bytes": nbytes_for(spec, rows), "eviction": eviction, "ttl": ttl}


class Counts(nnx.Module):
    """A row counts the updates that its key has had."""

    def __init__(self, **given: Any) -> None:
        self.table = jg.HashTable(1, **given)

    def __call__(self, ids: Any) -> Any:
        return self.table(ids)


def loss(model: Any, batch: Any) -> Any:
    seen = jax.nn.one_hot(batch["number"], KEYS).sum(0)
    return -model(batch["ids"]).sum(), {"seen": seen}


def counts_in(model: Any) -> dict[int, float]:
    """Returns the row of each key."""
    if isinstance(model, nnx.Module):
        table: Any = model
        known, rows = table.table.known[...], table.table.rows[...]
    else:
        known = model["KnownKeys"]["ToLinen_0"]["known"]
        rows = model["params"]["ToLinen_0"]["rows"]
    keys = join_keys(np.asarray(known)[1:])
    values = np.asarray(rows)[1:, 0]
    return dict(zip(keys.tolist(), values.tolist(), strict=True))


def examples() -> dict[str, Any]:
    """Examples of a key each, those of low numbers more often."""
    number = (np.random.default_rng(0).random(64) ** 2 * KEYS).astype(np.int32)
    return {"ids": jg.split_keys(number[:, None]), "number": number}


def check_rows(run: Run, lookups: Any) -> None:
    """No row has more updates than it can have had, and none has parts of one.

    Args:
      run: is over.
      lookups: how often each key was looked up, by key.
    """
    model: Any = run.model()
    found = counts_in(model)
    assert found
    for key, count in found.items():
        assert 0 <= count <= lookups[key]
        assert count == round(count)
    assert all(event.rows <= ROOM for event in run.events())

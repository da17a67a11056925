"""Data that stays with the clients of federated training: opened where it is."""

import json
from collections.abc import Sequence

import jax
import numpy as np

from jgraph.client.cluster import Cluster
from jgraph.client.state.sources import SourceFacts, open_source_on
from jgraph.errors import ConfigError, DataError
from jgraph.graph.ir import TaskName
from jgraph.runtime.data.client_rounds import steps_of
from jgraph.train.data.data import Dataset
from jgraph.train.data.source import Source, shown


def open_clients(
    data: object,
    cluster: Cluster,
    *,
    epochs: int,
    batch_size: int,
    seed: int,
    each: int,
) -> Dataset:
    """Opens the data of each client on its host; returns what a round is there.

    This process learns the types of the fields and how many examples each client has.

    Args:
      data: what the user gave.
      cluster: its workers are the clients.
      epochs: of a round.
      batch_size: examples of a step.
      seed: decides the order of the examples.
      each: clients that are drawn for a round.

    Raises:
      ConfigError: this is no data that a client has.
      DataError: clients whose data is of other types, or too few examples of one.
      SourceError: a client cannot open it.
    """
    if not isinstance(data, Source):
        raise ConfigError(
            f"Federated trains on what each client has, and data is a "
            f"{type(data).__name__} of this process; give a jg.Source that each "
            "worker opens on its own host, for example "
            "jg.Source.npz('/data/mine.npz')"
        )
    clients, spec = list(cluster.tasks("worker")), data.spec_for()
    plain = json.dumps(spec, sort_keys=True)
    facts = [open_source_on(cluster, client, plain) for client in clients]
    _check_fields(clients, facts)
    counts = [sum(part.examples for part in each.parts) for each in facts]
    steps = [steps_of(count, epochs, batch_size) for count in counts]
    for client, count, its_steps in zip(clients, counts, steps, strict=True):
        if not its_steps:
            raise DataError(
                f"{client} has {count} examples, which in {epochs} epochs make no "
                f"batch of {batch_size}; give fit(batch_size={count * epochs}) or "
                "less, or more local_epochs"
            )
    rounds = {
        "kind": "rounds",
        "of": spec,
        "epochs": epochs,
        "batch_size": batch_size,
        "steps": max(steps),
        "seed": seed,
        "each": each,
    }
    source = json.dumps(rounds, sort_keys=True)
    opened = [open_source_on(cluster, client, source) for client in clients]
    return _dataset(facts[0], opened[0], source)


def _check_fields(clients: Sequence[TaskName], facts: Sequence[SourceFacts]) -> None:
    for client, each in zip(clients, facts, strict=True):
        if each.fields != facts[0].fields:
            here, there = (
                ", ".join(f"{name} {field}" for name, field in one.fields.items())
                for one in (each, facts[0])
            )
            raise DataError(
                f"the data of {client} has {here}, and that of {clients[0]} {there}; "
                "all clients need fields of the same names, shapes and types"
            )


def _dataset(own: SourceFacts, rounds: SourceFacts, source: str) -> Dataset:
    """Returns the rounds of any client as data of which each is one example."""
    of = Dataset(*shown(own), facts=own, source=source)
    number = jax.tree.unflatten(of.tree, [0] * of.tree.num_leaves)
    tree = jax.tree.structure({"data": number, "round": {"examples": 0, "steps": 0}})
    count = sum(part.examples for part in rounds.parts)
    fields = {
        name: np.broadcast_to(np.zeros((), field.dtype), (count, *field.shape))
        for name, field in sorted(rounds.fields.items())
    }
    return Dataset(fields, tree, facts=rounds, source=source, of=of)

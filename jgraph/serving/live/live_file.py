"""Description of a live version in a file: its variables, and the code of its batches.

Such a version has code and an example, as others have, and no arrays: these are on the
parameter servers of a run. The file is JSON, called by its digest as code is, and names
the code for each number of rows.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, final

import numpy as np

from jgraph.errors import ArtifactError, JGError
from jgraph.graph.device import DeviceSpec
from jgraph.graph.ir import VariableSpec
from jgraph.graph.rows.hash_spec import Admission, Column, HashSpec, Initial
from jgraph.graph.rows.rows import Layout
from jgraph.graph.sharding import Sharding
from jgraph.graph.variable import Variable
from jgraph.serving.live.batch_code import LookedUp
from jgraph.serving.live.live_options import LiveOptions
from jgraph.serving.live.table_rows import LiveTable

FORMAT: Final = 1
_ODD: Final = (KeyError, TypeError, ValueError, AttributeError, RecursionError)


@final
@dataclass(frozen=True, slots=True)
class BatchPrograms:
    """Digests of the code for one number of rows; see ``BatchCode``.

    Attributes:
      rows: of a batch.
      tables: those that are looked up.
      ids: code of their ids; empty: there are none.
      outputs: code of the outputs.
    """

    rows: int
    tables: tuple[LookedUp, ...]
    ids: str
    outputs: str


@final
@dataclass(frozen=True, slots=True)
class LiveDescription:
    """What a live version is made of.

    Attributes:
      options: how it is served.
      count: the variable that counts updates.
      dense: variables of which copies are served.
      tables: those of which rows are looked up.
      batches: their code, by rising numbers of rows.
    """

    options: LiveOptions
    count: Variable
    dense: Sequence[Variable]
    tables: Mapping[str, LiveTable]
    batches: tuple[BatchPrograms, ...]

    def to_bytes(self) -> bytes:
        """Returns it as a file has it."""
        body = {
            "format": FORMAT,
            "options": asdict(self.options),
            "count": _spec_to(self.count.spec),
            "dense": [_spec_to(variable.spec) for variable in self.dense],
            "tables": [
                {"variable": _spec_to(one.variable.spec), "counts": one.counts}
                for one in self.tables.values()
            ],
            "batches": [asdict(batch) for batch in self.batches],
        }
        return json.dumps(body).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "LiveDescription":
        """Reads what ``to_bytes`` gave.

        Raises:
          ArtifactError: it is something else.
        """
        try:
            return cls._of(json.loads(data))
        except _ODD as error:
            why = str(error)
        except JGError as error:
            why = error.message
        raise ArtifactError(f"the description of a live version means nothing: {why}")

    @classmethod
    def _of(cls, body: Mapping[str, Any]) -> "LiveDescription":
        if body["format"] != FORMAT:
            raise ValueError(f"it is of format {body['format']!s:.20}")
        tables = [
            LiveTable(_variable(one["variable"]), tuple(map(int, one["counts"])))
            for one in body["tables"]
        ]
        batches = tuple(map(_batch, body["batches"]))
        sizes = [batch.rows for batch in batches]
        if not sizes or sizes[0] != 1 or sizes != sorted(set(sizes)):
            raise ValueError("numbers of rows that do not rise from 1")
        return cls(
            LiveOptions(**body["options"]),
            _variable(body["count"]),
            [_variable(one) for one in body["dense"]],
            {one.variable.name: one for one in tables},
            batches,
        )


def _batch(body: Mapping[str, Any]) -> BatchPrograms:
    tables = tuple(map(_looked_up, body["tables"]))
    return BatchPrograms(int(body["rows"]), tables, body["ids"], body["outputs"])


def _looked_up(body: Mapping[str, Any]) -> LookedUp:
    inputs = tuple(map(int, body.get("inputs", ())))
    if any(number < 0 for number in inputs):
        raise ValueError("a table has ids of an input below 0")
    return LookedUp(**{**body, "shape": tuple(body["shape"]), "inputs": inputs})


def _spec_to(spec: VariableSpec) -> dict[str, Any]:
    cut = spec.sharding
    return {
        "name": spec.name,
        "shape": spec.shape,
        "dtype": np.dtype(spec.dtype).name,
        "device": str(spec.device),
        "container": spec.container,
        "sharding": None if cut is None else asdict(cut),
        "shard_devices": [str(device) for device in spec.shard_devices],
        "table": None if spec.table is None else asdict(spec.table),
    }


def _variable(body: Mapping[str, Any]) -> Variable:
    spec = VariableSpec(
        body["name"],
        tuple(map(int, body["shape"])),
        np.dtype(body["dtype"]),
        DeviceSpec.from_string(body["device"]),
        body["container"],
        None if body["sharding"] is None else _sharding(body["sharding"]),
        tuple(map(DeviceSpec.from_string, body["shard_devices"])),
        None if body["table"] is None else _table(body["table"]),
    )
    variable = Variable(spec.name, (spec.shape, spec.dtype, None))
    variable.spec = spec
    return variable


def _sharding(body: Mapping[str, Any]) -> Sharding:
    layout = body["layout"]
    return Sharding(Layout(tuple(layout["sizes"]), layout["kind"]), body["axis"])


def _table(body: Mapping[str, Any]) -> HashSpec:
    columns = tuple(
        Column(**{**one, "initial": Initial(**one["initial"])})
        for one in body["columns"]
    )
    admission = Admission(**body["admission"])
    return HashSpec(**{**body, "columns": columns, "admission": admission})

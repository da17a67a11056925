"""Writer of a SavedModel: the part that needs TensorFlow, run in a process of its own.

``python tensorflow_writer.py PARTS SAVED``. Imports nothing of jgraph or JAX: its
Python may be that of another environment. ``PARTS`` has a plan and the files that it
names; the answers of the SavedModel for the example are written beside them.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla


def array(parts: Path, one: dict[str, Any]) -> Any:
    """Reads an array; NumPy has not all of the dtypes."""
    dtype = tf.dtypes.as_dtype(one["dtype"]).as_numpy_dtype
    content = (parts / one["file"]).read_bytes()
    return np.frombuffer(content, dtype).reshape(one["shape"])


def function(parts: Path, plan: dict[str, Any], variables: dict[str, Any]) -> Any:
    """Returns a function of TensorFlow that runs StableHLO."""
    code = (parts / plan["code"]).read_bytes()
    outputs = plan["outputs"]
    types = [tf.dtypes.as_dtype(one["dtype"]) for one in outputs]
    shapes = [tf.TensorShape(one["shape"]) for one in outputs]
    inputs = [
        tf.TensorSpec(one["shape"], tf.dtypes.as_dtype(one["dtype"]), one["name"])
        for one in plan["inputs"]
    ]

    def run(*values: Any) -> dict[str, Any]:
        arguments = [*(variables[name] for name in plan["arguments"]), *values]
        results = xla.call_module(
            [tf.convert_to_tensor(arguments[place]) for place in plan["kept"]],
            version=plan["version"],
            module=code,
            Tout=types,
            Sout=shapes,
            platforms=plan["platforms"],
        )
        return dict(zip((one["name"] for one in outputs), results, strict=True))

    return tf.function(run, input_signature=inputs)


def main(parts: Path, saved: Path) -> None:
    """Writes the SavedModel, loads it again, and asks it."""
    plan = json.loads((parts / "plan.json").read_text(encoding="utf-8"))
    newest = xla.call_module_maximum_supported_version()
    module = tf.Module()
    module.arrays = [
        tf.Variable(array(parts, one), trainable=False, name=f"array_{n}")
        for n, one in enumerate(plan["arrays"])
    ]
    names = [one["name"] for one in plan["arrays"]]
    variables = dict(zip(names, module.arrays, strict=True))
    module.functions = {}
    for name, one in plan["functions"].items():
        if one["version"] > newest:
            sys.exit(
                f"TensorFlow {tf.__version__} runs code up to version {newest} of its "
                f"calling convention, and this is of version {one['version']}; take a "
                "newer TensorFlow"
            )
        module.functions[name] = function(parts, one, variables)
    tf.saved_model.save(module, str(saved), signatures=dict(module.functions))
    loaded = tf.saved_model.load(str(saved))
    for name, one in plan["functions"].items():
        inputs = {i["name"]: tf.constant(array(parts, i)) for i in plan["example"]}
        answers = loaded.signatures[name](**inputs)
        for output in one["outputs"]:
            answer = answers[output["name"]].numpy()
            (parts / output["answer"]).write_bytes(np.ascontiguousarray(answer))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

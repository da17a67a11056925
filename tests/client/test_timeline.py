"""A step traced on a real cluster makes a timeline that viewers take."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import jgraph as jg
from jgraph.client.session import Session
from tests.support.traces import check_trace


def test_a_traced_step_shows_every_task_its_segments_and_messages(
    session: Session, tmp_path: Path
) -> None:
    w = jg.Variable("w", jnp.ones((4, 4)), device="/job:ps/task:0")

    def step(x: jnp.ndarray) -> jnp.ndarray:
        with jg.device("/job:worker/task:0"):
            hidden = jnp.tanh(x @ w[...])
        with jg.device("/job:worker/task:1"):
            return hidden.sum()

    session.run(step, np.ones((2, 4), np.float32), trace=True)
    session.run_metadata.save_timeline(tmp_path / "step.json")
    trace = json.loads((tmp_path / "step.json").read_text(encoding="utf-8"))
    check_trace(trace)
    events = trace["traceEvents"]
    processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert [p.split(" ")[0] for p in processes] == session.run_metadata.tasks
    assert len(processes) == 3
    kinds = {e["cat"] for e in events if e["ph"] == "X"}
    assert {"compute", "send", "recv wait"} <= kinds
    arrows = [(e["id"], e["ts"]) for e in events if e["ph"] == "s"]
    ends = {e["id"]: e["ts"] for e in events if e["ph"] == "f"}
    # By one clock, within what a message takes, nothing comes before it was sent.
    assert arrows
    assert all(ends[key] >= sent - 1.0 for key, sent in arrows)

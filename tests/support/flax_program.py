"""A Flax program of somebody who does not have jgraph: trains, saves, reads with Orbax.

``python flax_program.py DIR`` saves in all the ways that Flax's guides show, and what
three more steps come to. Then it reads what is named on its input, a directory of steps
of jgraph and where to put what was read. Its process never imports jgraph.
"""

import sys
from pathlib import Path
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from flax.training import checkpoints, train_state

STEPS, MORE = 4, 3


def data() -> tuple[Any, Any]:
    """Returns 16 examples."""
    x = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    return x, np.sin(x.sum(axis=1, keepdims=True)).astype(np.float32)


def tx() -> optax.GradientTransformation:
    """Returns an optimizer with state of several kinds."""
    schedule = optax.cosine_decay_schedule(1e-2, 100)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))


class Linen(nn.Module):
    """Two layers, and statistics between them."""

    @nn.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        """Returns predictions."""
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(3, use_bias=False)(x))
        return nn.Dense(1)(nn.relu(x))


class Nnx(nnx.Module):
    """The like, with a list of layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(4, 3, use_bias=False, rngs=rngs)])
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.dropout = nnx.Dropout(0.0, rngs=rngs)
        self.head = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        """Returns predictions."""
        return self.head(nnx.relu(self.dropout(self.norm(self.layers[0](x)))))


class State(train_state.TrainState):
    """What Flax's guides keep, with the statistics of BatchNorm."""

    batch_stats: Any


def _linen(*steps: int) -> list[State]:
    """Returns the state after each of these numbers of steps."""
    x, y = data()
    model = Linen()
    variables = model.init(jax.random.key(1), x)

    @jax.jit
    def step(state: State) -> State:
        def loss(params: Any) -> Any:
            all_ = {"params": params, "batch_stats": state.batch_stats}
            out, new = model.apply(all_, x, train=True, mutable=["batch_stats"])
            return jnp.mean((out - y) ** 2), new

        grads, new = jax.grad(loss, has_aux=True)(state.params)
        new_state: State = state.apply_gradients(  # type: ignore[no-untyped-call]
            grads=grads, batch_stats=new["batch_stats"]
        )
        return new_state

    state = State.create(  # type: ignore[no-untyped-call]
        apply_fn=model.apply,
        params=variables["params"],
        tx=tx(),
        batch_stats=variables["batch_stats"],
    )
    states = [state]
    for _ in range(max(steps)):
        states.append(step(states[-1]))
    return [states[number] for number in steps]


def _nnx(*steps: int) -> list[tuple[Nnx, nnx.Optimizer[Any]]]:
    """Returns copies after each of these numbers of steps."""
    x, y = data()
    model = Nnx(nnx.Rngs(1))
    optimizer = nnx.Optimizer(model, tx(), wrt=nnx.Param)

    @nnx.jit
    def step(model: Nnx, optimizer: nnx.Optimizer[Any]) -> None:
        grads = nnx.grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
        optimizer.update(model, grads)

    states = [nnx.clone((model, optimizer))]
    for _ in range(max(steps)):
        step(model, optimizer)
        states.append(nnx.clone((model, optimizer)))
    return [states[number] for number in steps]


def _write(where: Path) -> None:
    early, state, later = _linen(1, STEPS, STEPS + MORE)
    (model, optimizer), (trained, _) = _nnx(STEPS, STEPS + MORE)
    with ocp.StandardCheckpointer() as standard:
        standard.save(where / "linen_standard", state)
        standard.save(where / "linen_params", state.params)
        standard.save(where / "linen_variables", {"params": state.params})
        standard.save(where / "nnx_model", nnx.state(model))
        standard.save(where / "nnx_pure", nnx.to_pure_dict(nnx.state(model)))
        standard.save(where / "nnx_both", nnx.state((model, optimizer)))
        split = {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}
        standard.save(where / "nnx_split", split)
    ocp.PyTreeCheckpointer().save(where / "linen_pytree", state)
    with ocp.CheckpointManager(where / "linen_manager") as manager:
        for number, saved in ((1, early), (STEPS, state)):
            manager.save(number, args=ocp.args.StandardSave(saved))
    with ocp.CheckpointManager(where / "linen_items") as manager:
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state), notes=ocp.args.JsonSave({"epoch": 1})
        )
        manager.save(STEPS, args=args)
    with ocp.CheckpointManager(where / "nnx_manager") as manager:
        manager.save(STEPS, args=ocp.args.StandardSave(nnx.state((model, optimizer))))
    checkpoints.save_checkpoint(where / "linen_flax", state, step=STEPS)
    flax.config.update("flax_use_orbax_checkpointing", False)
    checkpoints.save_checkpoint(where / "linen_legacy", state, step=STEPS)
    x, _y = data()
    variables = {"params": later.params, "batch_stats": later.batch_stats}
    trained.eval()  # type: ignore[no-untyped-call]
    np.savez(
        where / "later.npz",
        linen=np.asarray(Linen().apply(variables, x)),
        nnx=np.asarray(trained(x)),
    )


def _read(where: Path, out: Path) -> None:
    """Reads the newest step as users of ``CheckpointManager`` do, into a TrainState."""
    target = jax.tree.map(np.asarray, _linen(0)[0])
    like = {
        "params": target.params,
        "opt_state": target.opt_state,
        "state": {"batch_stats": target.batch_stats},
        "global_step": np.zeros((), np.int32),
    }
    with ocp.CheckpointManager(where) as manager:
        steps = list(manager.all_steps())
        newest = manager.latest_step()
        tree = manager.restore(newest, args=ocp.args.StandardRestore(like))
        plain = manager.restore(newest, args=ocp.args.StandardRestore())
    state = target.replace(
        step=tree["global_step"],
        params=tree["params"],
        opt_state=tree["opt_state"],
        batch_stats=tree["state"]["batch_stats"],
    )
    x, _y = data()
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    alone = ocp.StandardCheckpointer().restore(where / str(newest), like)
    same = jax.tree.map(np.array_equal, tree, alone)
    np.savez(
        out,
        steps=steps,
        step=np.asarray(state.step),
        predicted=np.asarray(Linen().apply(variables, x)),
        kernel=plain["params"]["Dense_0"]["kernel"],
        same=all(jax.tree.leaves(same)),
    )


if __name__ == "__main__":
    _write(Path(sys.argv[1]).absolute())
    sys.stdout.write("written\n")
    sys.stdout.flush()
    for line in sys.stdin:
        _read(*map(Path, line.split()))
        sys.stdout.write("read\n")
        sys.stdout.flush()
    assert "jgraph" not in sys.modules

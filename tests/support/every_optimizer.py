"""Every optimizer and wrapper that the installed optax has, with arguments for each."""

import inspect
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

# Required parameters, by their names.
REQUIRED: Mapping[str, Any] = {
    "learning_rate": 0.05,
    "optimizer": optax.sgd(0.05, 0.9),
    "base_optimizer": optax.sgd(0.05, 0.9),
    "fast_optimizer": optax.sgd(0.05, 0.9),
    "adv_optimizer": optax.sgd(0.01),
    "inner": optax.adam(0.05),
    "tx": optax.adam(0.05),
    "clipping": 0.1,
    "decay": 0.9,
    "eta": 0.01,
    "gamma": 0.55,
    "l2_norm_clip": 1.0,
    "noise_multiplier": 0.1,
    "max_consecutive_errors": 3,
    "max_delta": 0.1,
    "max_norm": 0.1,
    "max_linesearch_steps": 4,
    "max_backtracking_steps": 4,
    "step_size": -0.05,
    "step_size_fn": lambda step: -0.05 / (1 + step),
    "sync_period": 2,
    "slow_step_size": 0.5,
    "threshold": 0.1,
    "seed": 0,
    "mask": True,
    "freeze_mask": False,
}

# What switches more of an optimizer on: state, terms of the update.
SWITCHES: Mapping[str, Any] = {
    "momentum": 0.9,
    "nesterov": True,
    "weight_decay": 1e-2,
    "weight_decay_rate": 1e-2,
    "centered": True,
    "bias_correction": True,
    "initial_scale": 0.1,
    "cooldown": 1,
    "accumulation_size": 2,
    "store_grad": True,
}

# Parameters for which the usual value would leave parts unused at such sizes.
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "adafactor": {"min_dim_size_to_factor": 3},
    "scale_by_factored_rms": {"min_dim_size_to_factor": 3},
    "apply_every": {"k": 2},
    "add_noise": {"key": 0},
    "noisy_sgd": {"key": 0},
    "differentially_private_aggregate": {"key": 0},
    "lbfgs": {"memory_size": 2},
    "scale_by_lbfgs": {"memory_size": 2},
    "galore": {"rank": 2, "update_proj_gap": 2},
    "scale_by_galore": {"rank": 2, "update_proj_gap": 2},
    "sophia": {"update_interval": 2},
    "sam": {"reset_state": False},
    "reduce_on_plateau": {"patience": 1},
    "freeze": {"mask": False},
}

# What makes no optimizer, and does not say what it makes.
OTHERS = {"schedule_free_eval_params"}

large: Callable[[Any], Any] = lambda updates: optax.tree.norm(updates) > 0.1
descend: Callable[..., Any] = lambda updates, params: jax.tree.map(
    lambda update: -0.05 * jnp.tanh(update), updates
)

# Functions of other functions.
MADE: Mapping[str, Mapping[str, Callable[[], Any]]] = {
    "chain": {
        "decay and momentum": lambda: optax.chain(
            optax.add_decayed_weights(1e-2), optax.sgd(0.05, 0.9, nesterov=True)
        ),
        "clip, adam, schedule": lambda: optax.chain(
            optax.clip_by_global_norm(0.1),
            optax.scale_by_adam(),
            optax.scale_by_learning_rate(optax.cosine_decay_schedule(0.05, 10)),
        ),
    },
    "named_chain": {
        "": lambda: optax.named_chain(
            ("clip", optax.clip(0.1)), ("step", optax.adam(0.05))
        )
    },
    "inject_hyperparams": {
        "": lambda: optax.inject_hyperparams(optax.sgd)(
            optax.exponential_decay(0.05, 2, 0.5), momentum=0.9
        )
    },
    "inject_stateful_hyperparams": {
        "": lambda: optax.inject_stateful_hyperparams(optax.adamw)(0.05, b1=0.8)
    },
    "multi_transform": {
        "": lambda: optax.multi_transform(
            {"a": optax.adamw(0.05), "b": optax.sgd(0.05, 0.9)},
            lambda params: jax.tree_util.tree_map_with_path(
                lambda path, _: "a" if "kernel" in str(path) else "b", params
            ),
        )
    },
    "partition": {
        "": lambda: optax.partition(
            {"a": optax.adam(0.05), "b": optax.set_to_zero()},
            lambda params: jax.tree_util.tree_map_with_path(
                lambda path, _: "a" if "kernel" in str(path) else "b", params
            ),
        )
    },
    "masked": {
        "": lambda: optax.masked(
            optax.adamw(0.05),
            lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
        )
    },
    "conditionally_transform": {
        "": lambda: optax.conditionally_transform(
            optax.adam(0.05), lambda step: step % 2 == 0
        )
    },
    "conditionally_mask": {
        "": lambda: optax.conditionally_mask(
            optax.adam(0.05), lambda step: step % 2 == 0
        ),
        "given the loss": lambda: optax.conditionally_mask(
            optax.adam(0.05),
            lambda step, value, **_: value > 0.3,
            forward_extra_args=True,
        ),
    },
    "snapshot": {
        "": lambda: optax.chain(
            optax.snapshot("norm", optax.tree.norm), optax.sgd(0.05, 0.9)
        )
    },
    "monitor": {
        "": lambda: optax.chain(
            optax.sgd(0.05, 0.9),
            optax.monitor(
                {
                    "norm": optax.tree.norm,
                    "is_large": optax.measure_with_ema(large, decay=0.9),
                }
            ),
            optax.clip_by_global_norm(0.1),
        )
    },
    "measure_with_ema": {
        "": lambda: optax.chain(
            optax.monitor({"is_large": optax.measure_with_ema(large, decay=0.9)}),
            optax.sgd(0.05),
        )
    },
    "stateless": {"": lambda: optax.stateless(descend)},
    "stateless_with_tree_map": {
        "": lambda: optax.stateless_with_tree_map(lambda update, _: -0.05 * update)
    },
    "MultiSteps": {
        f"of {k}": lambda k=k: optax.MultiSteps(  # type: ignore[misc]
            optax.adamw(0.05), k
        ).gradient_transformation()
        for k in (1, 2)
    },
    "sam": {
        "opaque": lambda: contrib.sam(
            optax.sgd(0.05, 0.9), optax.sgd(0.01), reset_state=False, opaque_mode=True
        )
    },
    "sgd": {"schedule": lambda: optax.sgd(optax.linear_schedule(0.1, 0.01, 5), 0.9)},
    "adam": {
        "nesterov, bfloat16": lambda: optax.adam(
            0.05, nesterov=True, mu_dtype=jnp.bfloat16
        )
    },
}


def makers() -> dict[str, Callable[..., Any]]:
    """Returns each public function of optax that makes an optimizer, by its name."""
    modules = [optax, contrib]
    modules += [
        module
        for _, module in inspect.getmembers(optax, inspect.ismodule)
        if module.__name__.startswith("optax.") and "._" not in module.__name__
    ]
    found: dict[str, Callable[..., Any]] = {"MultiSteps": optax.MultiSteps}
    for module in modules:
        for name, fn in inspect.getmembers(module, inspect.isfunction):
            if not name.startswith("_") and name not in found and _makes(fn):
                found[name] = fn
    return found


def _makes(fn: types.FunctionType) -> bool:
    said = str(inspect.signature(fn).return_annotation)
    if "GradientTransformation" in said:
        return True
    unsaid = {str(inspect.Signature.empty), str(Any)}
    if said not in unsaid or fn.__name__ in OTHERS:
        return False
    try:  # some do not say what they return
        return isinstance(_called(fn, {}), optax.GradientTransformation)
    except LookupError:
        return fn.__module__.startswith(("optax.transforms.", "optax.contrib."))
    except Exception:  # noqa: BLE001  # of a function that is something else
        return False


def _called(fn: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    given = dict(options)
    for name, parameter in inspect.signature(fn).parameters.items():
        needed = parameter.default is parameter.empty
        if needed and parameter.kind is not parameter.VAR_KEYWORD:
            if name not in REQUIRED and name not in given:
                raise LookupError(
                    f"optax.{fn.__name__} needs an argument '{name}': add it to "
                    "REQUIRED, or the whole call to MADE, in tests/train/"
                    "every_optimizer.py"
                )
            given.setdefault(name, REQUIRED.get(name))
    return _quietly(partial(fn, **given))


def _quietly(make: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # still an optimizer
        return make()


def variants() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields names of optimizers, and what makes them; both are tried."""
    for name, fn in sorted(makers().items()):
        for how, make in MADE.get(name, {}).items():
            yield f"{name}({how})", partial(_quietly, make)
        if name in MADE and name not in {"sam", "sgd", "adam"}:
            continue
        options = OPTIONS.get(name, {})
        yield name, partial(_called, fn, options)
        free = inspect.signature(fn).parameters.keys() - options.keys()
        more = {key: value for key, value in SWITCHES.items() if key in free}
        if more:
            shown, given = ", ".join(more), {**options, **more}
            yield f"{name}({shown})", partial(_called, fn, given)

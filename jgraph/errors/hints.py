"""Hints for names that users look for and that do not exist here."""

import functools
import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Final, NoReturn, ParamSpec, TypeVar

from jgraph.errors.user import ConfigError

_P = ParamSpec("_P")
_R = TypeVar("_R")

_STEPS: Final = (
    "the loss as a function of (model, batch), and trainer.fit(data, steps=…), which "
    "makes the gradients and updates; a step of another form is a jg.function"
)

CLUSTER: Final[Mapping[str, str]] = {
    "attach": "trainer.attach(name); cluster.runs() has the names",
    "fit": "jg.Trainer(model, loss, tx, cluster=cluster).fit(data, steps=…)",
    "job": "jg.Trainer(model, loss, tx, cluster=cluster)",
    "kill": "cluster.drain(task); only the tasks of a jg.LocalCluster can be killed",
    "run": "cluster.session().run(function, x)",
    "stop": "cluster.shutdown(); cluster.close() lets the servers go on",
    "submit": "trainer.fit(…, detached=True), or cluster.session().run(function, x)",
}
TRAINER: Final[Mapping[str, str]] = {
    "apply_gradients": _STEPS,
    "compile": "jg.Trainer(model, loss, tx, metrics=…), which has all of it",
    "cuda": "cluster=, whose tasks have the devices",
    "eval": "trainer.evaluate(data); layers are in evaluation mode there",
    "evaluate_generator": "trainer.evaluate(data); data may be a generator",
    "fit_generator": "trainer.fit(data, steps=…); data may be a generator",
    "get_weights": "trainer.model()",
    "history": "trainer.run.metrics('loss')",
    "layers": "trainer.model()",
    "learning_rate": "trainer.hyperparams()['learning_rate']",
    "load": "trainer.restore(path)",
    "load_model": "trainer.restore(path)",
    "load_state_dict": "trainer.restore(path)",
    "load_weights": "trainer.restore(path)",
    "logs": "cluster.logs(task)",
    "loss": "trainer.run.metrics('loss'), or trainer.evaluate(data)['loss']",
    "lr": "trainer.hyperparams()['learning_rate']",
    "metrics": "trainer.run.metrics('loss'), or trainer.evaluate(data)",
    "metrics_names": "trainer.run.metric_names",
    "opt_state": "trainer.save(path), which has it; trainer.names says what is in it",
    "optimizer": "trainer.hyperparams(), or trainer.save(path), which has its state",
    "parameters": "trainer.model()",
    "params": "trainer.model()",
    "predict_generator": "trainer.predict(x)",
    "predict_on_batch": "trainer.predict(x)",
    "prepare": "jg.Trainer(model, loss, tx, cluster=cluster)",
    "save_model": "trainer.save(path), or jg.export(trainer, x, path) to serve it",
    "save_weights": "trainer.save(path)",
    "set_weights": "trainer.restore(path), or a new jg.Trainer of a model with them",
    "state": "trainer.model(), or trainer.save(path), which has all of it",
    "state_dict": "trainer.model(), or trainer.save(path)",
    "step": _STEPS,
    "steps": "trainer.run.steps",
    "stop": "trainer.run.stop()",
    "summary": "print(trainer.plan(data)), or nnx.display(model)",
    "test": "trainer.evaluate(data)",
    "test_on_batch": "trainer.evaluate(data)",
    "test_step": "Trainer(…, metrics=…), whose functions trainer.evaluate calls",
    "to": "cluster=, whose tasks have the devices",
    "train": "trainer.fit(data, steps=…)",
    "train_on_batch": "trainer.fit(batch, steps=1)",
    "train_step": _STEPS,
    "variables": "trainer.model(); trainer.names has the names of all variables",
    "wait": "trainer.run.wait()",
    "weights": "trainer.model()",
    "zero_grad": _STEPS,
}
RUN: Final[Mapping[str, str]] = {
    "attach": "trainer.attach(name); cluster.runs() has the names",
    "events": "cluster.events()",
    "cancel": "run.stop()",
    "explain": "cluster.explain()",
    "fit": "trainer.fit(data, steps=…), which goes on from there",
    "get_weights": "run.model()",
    "history": "run.metrics('loss'); run.metric_names has the names",
    "join": "run.wait()",
    "logs": "cluster.logs(task)",
    "loss": "run.metrics('loss')['value']",
    "params": "run.model()",
    "plan": "trainer.plan()",
    "predict": "trainer.predict(x)",
    "result": "run.wait(), then run.model()",
    "state_dict": "run.model(), or run.save(path)",
    "step": "run.steps",
    "timeline": "session.run(step, x, trace=True), then "
    "session.run_metadata.save_timeline('step.json')",
    "variables": "run.model()",
}

TRAINER_ARGUMENTS: Final[Mapping[str, str]] = {
    "device": "cluster=jg.LocalCluster(ps=2, workers=2), which has the devices",
    "learning_rate": "tx=optax.adam(1e-3); the optimizer has it",
    "loss_fn": "loss=…, a function of (model, batch)",
    "num_workers": "cluster=jg.LocalCluster(ps=2, workers=4)",
    "optimizer": "tx=optax.adam(1e-3)",
    "rng": "seed=0",
    "scaling_config": "cluster=jg.LocalCluster(ps=2, workers=4)",
}
FIT_ARGUMENTS: Final[Mapping[str, str]] = {
    "batch": "batch_size=128",
    "class_weight": "the weights as a field of the data, which the loss uses",
    "eval_dataset": "eval_data=(x, y)",
    "initial_epoch": "trainer.restore(path), which goes on from a checkpoint",
    "max_epochs": "epochs=10",
    "max_steps": "steps=1000",
    "num_epochs": "epochs=10",
    "num_steps": "steps=1000",
    "num_train_epochs": "epochs=10",
    "sample_weight": "the weights as a field of the data, which the loss uses",
    "shuffle": "nothing: arrays are shuffled by the seed of the Trainer; what can only "
    "be iterated comes in its order",
    "steps_per_epoch": "steps=1000, of the whole run",
    "train_dataset": "trainer.fit(data, steps=…)",
    "validation_freq": "eval_every=100, in steps",
    "validation_split": "eval_data=(x[900:], y[900:])",
    "validation_steps": "eval_data=(x, y), all of which is evaluated",
    "verbose": "progress=False to show nothing",
}
EVALUATE_ARGUMENTS: Final[Mapping[str, str]] = {
    "sample_weight": "the weights as a field of the data, which the loss uses",
    "steps": "nothing: each example counts once",
    "verbose": "nothing: no progress is shown",
    "y": "the data as one argument: evaluate((x, y))",
}
CLUSTER_ARGUMENTS: Final[Mapping[str, str]] = {
    "n_workers": "workers=2",
    "num_evaluators": "evaluators=1",
    "num_ps": "ps=2",
    "num_replicas": "workers=2",
    "num_workers": "workers=2",
    "worker": "workers=2",
}
MODEL_SERVER_ARGUMENTS: Final[Mapping[str, str]] = {
    "address": "bind='127.0.0.1'",
    "certfile": "tls=(certificate, key)",
    "host": "bind='127.0.0.1'",
    "model_base_path": "path, a directory of models",
    "port": "grpc_port=8001, http_port=8000",
    "rest_api_port": "http_port=8000",
    "rest_port": "http_port=8000",
    "token": "token_file='serve_token'",
}
ASYNC_ARGUMENTS: Final[Mapping[str, str]] = {
    "backup_workers": "SyncPS(backup_workers=1)",
    "replicas_to_aggregate": "SyncPS(replicas_to_aggregate=2)",
    "staleness": "max_staleness=4",
    "dense": "SyncPS(dense='workers'); where no worker waits for others, a slow one "
    "would be waited for by all, for its part of the parameters",
}
SYNC_ARGUMENTS: Final[Mapping[str, str]] = {
    "max_staleness": "AsyncPS(max_staleness=4)",
    "prefetch": "AsyncPS(prefetch=1); the parameters of the next synchronous step are "
    "not there before the update",
}
LOCAL_ARGUMENTS: Final[Mapping[str, str]] = {
    "H": "sync_every=500",
    "inner": "the optimizer of the Trainer, which is the inner one: jg.Trainer(model, "
    "loss, optax.adamw(1e-3), …)",
    "local_epochs": "sync_every=500, in steps; jg.Federated has local_epochs=",
    "local_steps": "sync_every=500",
    "outer_optimizer": "outer=optax.sgd(0.7, momentum=0.9, nesterov=True)",
    "outer_tx": "outer=optax.sgd(0.7, momentum=0.9, nesterov=True)",
    "replicas_to_aggregate": "backup_workers=1",
    "secure_sum": "jg.Federated(secure_sum=jg.SecureSum(…))",
    "staleness": "max_staleness=4",
    "steps": "sync_every=500",
}
FEDERATED_ARGUMENTS: Final[Mapping[str, str]] = {
    "backup_workers": "round_timeout_s=600, after which a round goes on without those "
    "who are late",
    "clients_per_round": "fraction=0.1, min_clients=8",
    "dense": "jg.LocalSGD(dense='workers'); clients come and go, and hold no part of "
    "the parameters",
    "epochs": "local_epochs=5",
    "fraction_fit": "fraction=0.1",
    "min_fit_clients": "min_clients=8",
    "mu": "proximal=0.01",
    "proximal_mu": "proximal=0.01",
    "secure": "secure_sum=jg.SecureSum(…)",
    "staleness": "max_staleness=4",
    "sync_every": "local_epochs=1; jg.LocalSGD has sync_every=",
    "timeout_s": "round_timeout_s=600",
}


def naming_arguments(
    instead: Mapping[str, str],
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Makes a call with an argument that is not there say what is, before anything is.

    Args:
      instead: by such a name, what to write.

    Example:
      >>> @naming_arguments({"epoch": "steps=9"})
      ... def fit(*, steps: int = 1) -> None: ...
      >>> fit(epoch=3)
      Traceback (most recent call last):
      jgraph.errors.ConfigError: JG-124 fit has no argument 'epoch': write steps=9
    """

    def wrap(fn: Callable[_P, _R]) -> Callable[_P, _R]:
        names = [*inspect.signature(fn).parameters]
        what = fn.__qualname__.removesuffix(".__init__")

        @functools.wraps(fn)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if wrong := next((name for name in kwargs if name not in names), ""):
                near = get_close_matches(wrong, names, 1)
                hint = instead.get(wrong) or (near and f"{near[0]}=…")
                takes = ", ".join(name for name in names if name != "self")
                raise ConfigError(
                    f"{what} has no argument '{wrong}'"
                    + (f": write {hint}" if hint else f"; it takes {takes}")
                )
            return fn(*args, **kwargs)

        return call

    return wrap


def name_fields(of: type, instead: Mapping[str, str]) -> None:
    """Does what ``naming_arguments`` does for a dataclass.

    Args:
      of: the dataclass.
      instead: by a name that is no field of it, what to write.
    """
    init = naming_arguments(instead)(of.__init__)  # type: ignore[misc]
    of.__init__ = init  # type: ignore[misc]


def hinting(instead: Mapping[str, str]) -> Callable[[object, str], NoReturn]:
    """Returns a ``__getattr__`` that says what is written instead, where it is known.

    Hide it from type checkers, which would take every attribute for one that is there.

    Example:
      >>> class Box:
      ...     __getattr__ = hinting({"size": "len(box)"})
      >>> Box().size
      Traceback (most recent call last):
      AttributeError: 'Box' object has no attribute 'size': write len(box)
    """

    def missing(self: object, name: str) -> NoReturn:
        what = f"'{type(self).__name__}' object has no attribute '{name}'"
        hint = f": write {instead[name]}" if name in instead else ""
        raise AttributeError(what + hint, name=name, obj=self)

    return missing

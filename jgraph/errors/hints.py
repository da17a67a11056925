"""What to write instead of attributes that are often looked for, and are not there."""

from collections.abc import Callable, Mapping
from typing import Final, NoReturn

CLUSTER: Final[Mapping[str, str]] = {
    "attach": "trainer.attach(name); cluster.runs() has the names",
    "fit": "jg.Trainer(model, loss, tx, cluster=cluster).fit(data, steps=…)",
    "job": "jg.Trainer(model, loss, tx, cluster=cluster)",
    "kill": "cluster.drain(task); only the tasks of a jg.LocalCluster can be killed",
    "run": "cluster.session().run(function, x)",
    "stop": "cluster.shutdown(); cluster.close() lets the servers go on",
    "submit": "trainer.fit(…, detached=True), or cluster.session().run(function, x)",
}
RUN: Final[Mapping[str, str]] = {
    "attach": "trainer.attach(name); cluster.runs() has the names",
    "events": "cluster.events()",
    "explain": "cluster.explain()",
    "logs": "cluster.logs(task)",
    "plan": "trainer.plan()",
    "predict": "trainer.predict(x)",
    "timeline": "session.run(step, x, trace=True), then "
    "session.run_metadata.save_timeline('step.json')",
    "variables": "run.model()",
}


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

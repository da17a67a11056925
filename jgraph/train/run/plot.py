"""Plots of metrics over steps, by matplotlib; notebooks show them inline."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

import numpy as np

from jgraph.errors import ConfigError
from jgraph.runtime.data.batches import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WINDOW: Final = 25  # steps of a running mean


@final
@dataclass(frozen=True, slots=True)
class Curve:
    """One metric: its values at steps.

    ``every_step`` says that each step has a value: these are drawn with a running mean.
    """

    name: str
    steps: Array
    values: Array
    every_step: bool


@final
@dataclass(frozen=True, slots=True)
class Panel:
    """Curves that share their axes."""

    curves: Sequence[Curve]


@final
@dataclass(frozen=True, slots=True)
class Plot:
    """A figure of matplotlib that a notebook shows inline and ``save`` writes.

    Attributes:
      figure: to go on with, e.g. ``plot.figure.axes[0].set_yscale("log")``.
    """

    figure: "Figure"

    def save(self, path: str | Path) -> Path:
        """Writes the plot, and returns its absolute path.

        Args:
          path: ends in what matplotlib can write: ``.png``, ``.svg``, ``.pdf``, …

        Raises:
          ConfigError: another ending, or a place that cannot be written.
        """
        target = Path(path).expanduser().absolute()
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            self.figure.savefig(target, dpi=120)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot write the plot to {target} ({error}); choose another path"
            ) from error
        return target

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png", dpi=96)
        return buffer.getvalue()

    def __repr__(self) -> str:
        return f"<plot of {len(self.figure.axes)} panels: save('plot.png') writes it>"


def draw_plot(panels: Sequence[Panel]) -> Plot:
    """Returns a plot of panels side by side.

    Raises:
      ConfigError: matplotlib is not installed.
    """
    # A figure of its own: the user's pyplot state and backend stay untouched.
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "plots need matplotlib; install it: pip install 'jgraph[demo]'"
        ) from error

    figure = Figure(figsize=(5 * len(panels), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, panel in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
    ):
        for curve in panel.curves:
            _draw(axis, curve)
        axis.set_xlabel("step")
        axis.grid(visible=True, alpha=0.3)
        axis.legend()
    return Plot(figure)


def _draw(axis: "Axes", curve: Curve) -> None:
    if curve.every_step:
        axis.plot(curve.steps, curve.values, color="0.8", linewidth=0.8)
        axis.plot(curve.steps, _smooth(curve.values), label=curve.name)
    else:
        axis.plot(curve.steps, curve.values, marker="o", markersize=3, label=curve.name)


def _smooth(values: Array) -> Array:
    """Running mean over the last values, shorter at the beginning.

    Each is of its own values: of differences of sums, one value that is not finite, or
    huge, would be in all that follow.
    """
    after_zeros = np.concatenate([np.zeros(_WINDOW), values])
    windows = np.lib.stride_tricks.sliding_window_view(after_zeros, _WINDOW)[1:]
    counts = np.minimum(np.arange(1, len(values) + 1), _WINDOW)
    smooth: Array = windows.sum(axis=1) / counts
    return smooth

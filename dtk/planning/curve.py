"""The curve: rows per second and efficiency over workers, a line for each method."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from dtk.planning.prediction import Prediction
from dtk.planning.quantity import PlanError
from dtk.version import pip_install


def draw(predictions: Sequence[Sequence[Prediction]], path: str | os.PathLike[str]) -> None:
    """Write a figure."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PlanError(f"--plot needs matplotlib; run `{pip_install('bench')}`") from None
    figure = Figure(figsize=(9, 4), layout="constrained")
    speed, efficiency = figure.subplots(1, 2)
    for of in predictions:
        workers = [one.workers for one in of]
        style = "-" if of[0].method.use else ":"
        speed.plot(workers, [one.rows for one in of], style, label=of[0].method.name)
        efficiency.plot(workers, [one.efficiency for one in of], style)
    perfect = [one.rows / one.efficiency for one in predictions[0]]
    speed.plot([one.workers for one in predictions[0]], perfect, "k--", lw=0.8, label="perfect")
    speed.set(xlabel="workers", ylabel="rows per second", xscale="log", yscale="log")
    efficiency.set(xlabel="workers", ylabel="efficiency", xscale="log", ylim=(0, 1.05))
    speed.legend(fontsize=7)
    kind = Path(path).suffix.lstrip(".")
    if kind not in figure.canvas.get_supported_filetypes():
        raise PlanError(f"--plot {path}: unknown kind of file, expected such as curve.svg")
    try:
        figure.savefig(path)
    except OSError as error:
        raise PlanError(f"--plot {path}: cannot be written: {error.strerror}") from None

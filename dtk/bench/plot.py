"""The ratios to the limit as bars. Imports matplotlib where it draws, and no TensorFlow."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from dtk.bench import report
from dtk.bench.results import Results
from dtk.bench.setting import BenchError
from dtk.version import pip_install

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _BAR, _PEER = "#333333", "#3b6ea5", "#b0b7bf"
_ROW = 0.34  # inches


def check(file: str) -> None:
    """Refuse, before anything is measured, a plot that could not be drawn.

    Example:
        >>> check("bench.pdf")
        Traceback (most recent call last):
        dtk.bench.setting.BenchError: --plot bench.pdf: expected a name in .svg or .png
    """
    if Path(file).suffix not in (".svg", ".png"):
        raise BenchError(f"--plot {file}: expected a name in .svg or .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchError(f"--plot {file}: needs matplotlib; run `{pip_install('bench')}`")


def save(results: Results, file: str) -> None:
    """Draw a panel for each task, with a bar for each variant: its median, with quartiles.

    What trains is drawn as its ratio to the no-communication bound, an all-reduce as its time.
    """
    from matplotlib.figure import Figure

    counts = [max(1, len(turns)) for turns in results.turns.values()]
    height = sum(counts) * _ROW + 0.75 * len(counts)
    figure = Figure(figsize=(8, height), layout="constrained")
    panels = figure.subplots(len(counts), squeeze=False, height_ratios=counts)[:, 0]
    for panel, task in zip(panels, results.turns, strict=True):
        _draw(panel, results, task)
    figure.savefig(file, dpi=150)


def _draw(panel: Axes, results: Results, task: str) -> None:
    bars = report.bars(results, task)
    own = results.setting["communicators"]
    for row, (name, (low, middle, high)) in enumerate(bars.items()):
        color = _BAR if name.split()[0] in own else _PEER
        panel.barh(row, middle, color=color, height=0.7)
        panel.plot([low, high], [row, row], color=_INK, linewidth=1.2)
        places = 2 if report.has_bound(results, task) else report.digits(middle)
        panel.text(high, row, f"  {middle:.{places}f}", va="center", fontsize=8)
    panel.set_yticks(range(len(bars)), list(bars), fontsize=8)
    panel.invert_yaxis()
    panel.set_title(report.title(results, task), fontsize=10, loc="left")
    panel.set_xlabel(report.unit(results, task), fontsize=8)
    panel.tick_params(axis="x", labelsize=8)
    panel.spines[["top", "right"]].set_visible(False)
    panel.margins(x=0.1)
    panel.set_xlim(left=0)
    if report.has_bound(results, task):
        panel.axvline(1.0, color=_INK, linewidth=0.8, linestyle=":")

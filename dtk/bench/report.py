"""What is shown of a benchmark: tables, the notes below them, and a plot. No TensorFlow here."""

from __future__ import annotations

import importlib.util
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dtk.bench import page
from dtk.bench.results import BenchError, BenchResults, Reading, apart, block_of, bytes_of, in_step
from dtk.bench.worker import RankHost
from dtk.version import pip_install

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Turns = Sequence[list[Reading]]
Variants = Mapping[str, Turns]

BOUND = "limit"
# First word of jobs whose environment was changed, and of their own limit.
TUNED = "tuned"
IN_STEP = "limit in step"
OWN = "of its own"
LEGEND = "Medians over turns, of means over workers."
_LIMIT_LEGEND = (
    "limit: every worker trains by itself, with plain Keras and dtk's fused operations, "
    "and sends nothing. Of the limit: its "
    "time / this time, in the same round; 1 is perfect."
)
_IN_STEP_LEGEND = (
    "Limit in step: an estimate of the same steps if each began when the slowest worker had ended "
    "the one before: no way of sending spares that waiting."
)
_OWN_LEGEND = (
    "A peer's own limit is its framework training by itself, one that is tuned the limit under the "
    "same settings; of its own: that time / this time."
)
_BLOCK_LEGEND = (
    "block:ROWS: block momentum; a turn of it is of whole blocks, and so may have more steps."
)
_COMPARED = "saved / this"


def table(
    results: BenchResults, task: str, saved: BenchResults | None = None
) -> list[tuple[str, ...]]:
    """Return the table of one task: a header, then a row for each variant.

    Example:
        >>> turns = [[Reading(0.02, 0.0, 0.0, 1.0)], [Reading(0.03, 0.0, 0.0, 1.0)]]
        >>> table(BenchResults(turns={"mlp": {"limit": turns}}), "mlp")[1]
        ('limit', '40.0', '25.0 (22.5 - 27.5)', '1.00', '0 B', '0 %')
    """
    variants, count = _with_waiting(results, task), bytes_of(task)
    rows = [
        {"": name, **(_summed(turns, count) if count else _trained(name, turns, variants))}
        for name, turns in variants.items()
    ]
    if not any(row.get(OWN) for row in rows):
        rows = [{key: cell for key, cell in row.items() if key != OWN} for row in rows]
    if saved is not None:
        earlier = _with_waiting(saved, task)
        for name, row in zip(variants, rows, strict=True):
            runs = [_milliseconds(run[name])[1] for run in (earlier, variants) if name in run]
            row[_COMPARED] = f"{runs[0] / runs[1]:.2f}" if len(runs) == 2 else ""
    return [tuple(next(iter(rows), ())), *(tuple(row.values()) for row in rows)]


def _with_waiting(results: BenchResults, task: str) -> Variants:
    """Return what was measured, and behind the bound what it takes if steps wait for each other."""
    variants = results.turns.get(task, {})
    limit = variants.get(BOUND)
    ranks = results.setting.get("ranks", ())
    if not limit or len(ranks) < 2 or not apart(ranks):
        return variants
    others = {name: turns for name, turns in variants.items() if name != BOUND}
    return {BOUND: limit, IN_STEP: [_waiting(turn) for turn in limit], **others}


def _waiting(turn: list[Reading]) -> list[Reading]:
    seconds = in_step(turn)
    part = 1 - statistics.mean(reading.seconds for reading in turn) / seconds
    return [Reading(seconds, 0.0, part, turn[0].fit)]


def _trained(name: str, turns: Turns, variants: Variants) -> dict[str, str]:
    """Return the cells of a row of a model's table."""
    times = _milliseconds(turns)
    speed = 1000 / times[1]
    return {
        "steps/s": f"{speed:.{digits(speed)}f}",
        "ms per step (quartiles)": _with_quartiles(times),
        "of the limit": _ratio(turns, variants.get(BOUND)),
        OWN: _ratio(turns, variants.get(own_bound(name))),
        "sent per step": _known(turns, "sent", size),
        "communicating": _known(turns, "communicating", lambda part: f"{100 * part:.0f} %"),
    }


def _summed(turns: Turns, count: int) -> dict[str, str]:
    """Return the cells of a row of an all-reduce's table."""
    times = _milliseconds(turns)
    return {"ms (quartiles)": _with_quartiles(times), "GB/s": f"{count / times[1] / 1e6:.3g}"}


def own_bound(name: str) -> str:
    """Return the name of a baseline's own bound; a variant of dtk's has none.

    Example:
        >>> own_bound("torch ddp fp16")
        'torch limit'
    """
    return f"{name.split()[0]} {BOUND}"


def _milliseconds(turns: Turns) -> tuple[float, ...]:
    return quartiles([1000 * seconds for seconds in means(turns, "seconds")])


def _with_quartiles(values: Sequence[float]) -> str:
    low, middle, high = (f"{value:.{digits(values[1])}f}" for value in values)
    return f"{middle} ({low} - {high})"


def digits(value: float) -> int:
    """Return how many digits behind the point make three or four in all.

    Example:
        >>> digits(25.0), digits(1.5), digits(0.0123)
        (1, 2, 4)
    """
    return 1 if value >= 10 else 2 - math.floor(math.log10(value)) if value > 0 else 1


def _ratio(turns: Turns, limit: Turns | None) -> str:
    return "" if limit is None else f"{statistics.median(of_the_bound(turns, limit)):.2f}"


def _known(turns: Turns, what: str, write: Callable[[float], str]) -> str:
    """Return the median of what may not be known."""
    if any(getattr(reading, what) is None for turn in turns for reading in turn):
        return ""
    return write(statistics.median(means(turns, what)))


def bars(results: BenchResults, task: str) -> dict[str, tuple[float, ...]]:
    """Return what a plot shows of each variant."""
    variants = _with_waiting(results, task)
    limit = variants.get(BOUND)
    return {
        name: quartiles(of_the_bound(turns, limit)) if limit else _milliseconds(turns)
        for name, turns in variants.items()
    }


def means(turns: Turns, what: str) -> list[float]:
    """Return, of each measurement, the mean over its ranks of one number."""
    return [statistics.mean(getattr(reading, what) for reading in turn) for turn in turns]


def of_the_bound(turns: Turns, limit: Turns) -> list[float]:
    """Return, of each round, the bound's time / this time.

    Within a round, because whatever else the machine did then fell on both alike.
    """
    pairs = zip(means(limit, "seconds"), means(turns, "seconds"), strict=True)
    return [least / this for least, this in pairs]


def quartiles(values: Sequence[float]) -> tuple[float, ...]:
    """Return lower quartile, median and upper quartile, never beyond what was measured.

    Example:
        >>> quartiles([3.0, 1.0, 2.0]), quartiles([4.0])
        ((1.5, 2.0, 2.5), (4.0, 4.0, 4.0))
    """
    if len(values) == 1:
        return (values[0],) * 3
    return tuple(statistics.quantiles(values, n=4, method="inclusive"))


def size(count: float) -> str:
    """Write a number of bytes, to three digits or more.

    Example:
        >>> size(0), size(999), size(42_049_576), size(1_320_000)
        ('0 B', '999 B', '42.0 MB', '1.32 MB')
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.{2 if count < 10 * scale else 1}f} {unit}"
    return f"{count:.0f} B"


def title(results: BenchResults, task: str) -> str:
    """Return the model and how large it is, or what is reduced.

    Example:
        >>> title(BenchResults(parameters={"mlp": 10512394}), "mlp")
        'mlp, 10.51 M parameters'
        >>> title(BenchResults(), "allreduce 4000")
        'all-reduce of 4.00 kB'
    """
    if count := bytes_of(task):
        return f"all-reduce of {size(count)}"
    return f"{task}, {results.parameters[task] / 1e6:.2f} M parameters"


def progress(results: BenchResults, tasks: int) -> tuple[str, int, int]:
    """Return how far a measurement is, for the screen; turns that were taken, and that will be.

    Example:
        >>> turns = {"mlp": {"limit": [[]], "collective none": []}}
        >>> progress(BenchResults({"rounds": 5}, turns=turns), tasks=2)
        ('mlp: 1 of 10 turns', 1, 20)
    """
    rounds = results.setting["rounds"]
    planned = [rounds * len(variants) for variants in results.turns.values()]
    taken = [sum(map(len, variants.values())) for variants in results.turns.values()]
    text = f"{[*results.turns][-1]}: {taken[-1]} of {planned[-1]} turns"
    return text, sum(taken), sum(planned) + (tasks - len(planned)) * planned[-1]


def setting(results: BenchResults) -> str:
    """Return where and how it was measured, in a sentence."""
    facts = results.setting
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return (
        f"{facts['workers']} workers on {_hosts(facts['ranks'])}; batch {facts['batch_size']} per "
        f"worker, {facts['rounds']} turns of {facts['steps']} steps; {versions}"
    )


def _hosts(ranks: Sequence[RankHost]) -> str:
    hosts: dict[str, set[int]] = {}
    for rank in ranks:
        hosts.setdefault(rank["host"], set()).update(rank["cores"])
    cores = ", ".join(f"{host} ({len(used)} cores)" for host, used in hosts.items())
    threads = " or ".join(map(str, sorted({rank["threads"] for rank in ranks})))
    return f"{cores}, threads per worker: {threads}"


def tables(results: BenchResults, saved: BenchResults | None = None) -> list[page.Titled]:
    """Return a title and a table for each task."""
    return [(title(results, task), table(results, task, saved)) for task in results.turns]


def notes(results: BenchResults, saved: BenchResults | None = None) -> list[str]:
    """Return what stands below the tables: what is missing, how to read them, and the setting."""
    names = {name for task in results.turns for name in _with_waiting(results, task)}
    told = results.setting.get("tuned")
    legends = {
        LEGEND: True,
        _LIMIT_LEGEND: BOUND in names,
        _IN_STEP_LEGEND: IN_STEP in names,
        _OWN_LEGEND: any(own_bound(name) in names for name in names),
        f"{TUNED}: under {', '.join(told or ())}.": told,
        _BLOCK_LEGEND: any(map(block_of, results.setting.get("exchanges", ()))),
    }
    lines = [f"Not measured: {name}: {why}." for name, why in results.absent.items()]
    lines.append(" ".join(legend for legend, shown in legends.items() if shown))
    lines.append(f"Setting: {setting(results)}.")
    if saved is not None:
        lines.append(f"{_COMPARED}: time of a step there / here. Saved: {setting(saved)}.")
    return lines


_INK, _BAR, _PEER = "#333333", "#3b6ea5", "#b0b7bf"
_ROW = 0.34  # inches of a bar


def check_plot(file: str) -> None:
    """Refuse, before anything is measured, a plot that could not be drawn.

    Example:
        >>> check_plot("bench.pdf")
        Traceback (most recent call last):
        dtk.bench.results.BenchError: --plot bench.pdf: expected a name in .svg or .png
    """
    if Path(file).suffix not in (".svg", ".png"):
        raise BenchError(f"--plot {file}: expected a name in .svg or .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchError(f"--plot {file}: needs matplotlib; run `{pip_install('bench')}`")


def save_plot(results: BenchResults, file: str) -> None:
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


def _draw(panel: Axes, results: BenchResults, task: str) -> None:
    shown, bound = bars(results, task), BOUND in results.turns[task]
    own = results.setting["communicators"]
    for row, (name, (low, middle, high)) in enumerate(shown.items()):
        color = _BAR if name.split()[0] in own else _PEER
        panel.barh(row, middle, color=color, height=0.7)
        panel.plot([low, high], [row, row], color=_INK, linewidth=1.2)
        places = 2 if bound else digits(middle)
        panel.text(high, row, f"  {middle:.{places}f}", va="center", fontsize=8)
    panel.set_yticks(range(len(shown)), list(shown), fontsize=8)
    panel.invert_yaxis()
    panel.set_title(title(results, task), fontsize=10, loc="left")
    unit = "speed, of the limit (bar: median, line: quartiles)" if bound else "ms"
    panel.set_xlabel(unit, fontsize=8)
    panel.tick_params(axis="x", labelsize=8)
    panel.spines[["top", "right"]].set_visible(False)
    panel.margins(x=0.1)
    panel.set_xlim(left=0)
    if bound:
        panel.axvline(1.0, color=_INK, linewidth=0.8, linestyle=":")

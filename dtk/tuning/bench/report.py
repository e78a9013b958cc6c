"""Tables of what was measured: pure functions of results. No TensorFlow here."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from dtk.tuning.bench.results import Reading, Results

LIMIT = "limit"
HEADER = ("", "ms per step (quartiles)", "of the limit", "sent per step", "communicating")
LEGEND = (
    "Medians over turns, of means over workers. limit: every worker trains by itself, with plain "
    "Keras, and sends nothing. Of the limit: its time / this time, in the same round; 1 is perfect."
)
_COMPARED = "saved / this"


def table(results: Results, model: str, saved: Results | None = None) -> list[tuple[str, ...]]:
    """The table of one model: a header, then a row for each contender.

    Args:
        results: What was measured.
        model: Its name.
        saved: Another run, for one more column: the time of a step there / here.

    Example:
        >>> turns = [[Reading(0.02, 0.0, 0.0, 1.0)], [Reading(0.03, 0.0, 0.0, 1.0)]]
        >>> table(Results(turns={"mlp": {"limit": turns}}), "mlp")[1]
        ('limit', '25.0 (22.5 - 27.5)', '1.00', '0 B', '0 %')
    """
    contenders = results.turns[model]
    earlier = {} if saved is None else saved.turns.get(model, {})
    rows: list[tuple[str, ...]] = [HEADER if saved is None else (*HEADER, _COMPARED)]
    for name, turns in contenders.items():
        row = (name, *_row(turns, contenders[LIMIT]))
        if saved is not None:
            compared = ratio(earlier[name], turns) if name in earlier else None
            row = (*row, "" if compared is None else f"{compared:.2f}")
        rows.append(row)
    return rows


def _row(turns: Sequence[list[Reading]], limit: Sequence[list[Reading]]) -> tuple[str, ...]:
    low, middle, high = quartiles([1000 * seconds for seconds in means(turns, "seconds")])
    return (
        f"{middle:.1f} ({low:.1f} - {high:.1f})",
        f"{of_the_limit(turns, limit):.2f}",
        size(statistics.median(means(turns, "sent"))),
        f"{100 * statistics.median(means(turns, 'communicating')):.0f} %",
    )


def means(turns: Sequence[list[Reading]], what: str) -> list[float]:
    """Of each turn, the mean over its ranks of one number."""
    return [statistics.mean(getattr(reading, what) for reading in turn) for turn in turns]


def of_the_limit(turns: Sequence[list[Reading]], limit: Sequence[list[Reading]]) -> float:
    """Median, over rounds, of the limit's time / this time.

    Within a round, because whatever else the machine did then fell on both alike.
    """
    pairs = zip(means(limit, "seconds"), means(turns, "seconds"), strict=True)
    return statistics.median(least / this for least, this in pairs)


def ratio(earlier: Sequence[list[Reading]], turns: Sequence[list[Reading]]) -> float:
    """The median time of a step in an earlier run / in this one: above 1, this is faster."""
    before, now = (statistics.median(means(many, "seconds")) for many in (earlier, turns))
    return before / now


def quartiles(values: Sequence[float]) -> tuple[float, ...]:
    """Lower quartile, median, upper quartile, never beyond what was measured.

    Example:
        >>> quartiles([3.0, 1.0, 2.0]), quartiles([4.0])
        ((1.5, 2.0, 2.5), (4.0, 4.0, 4.0))
    """
    if len(values) == 1:
        return (values[0],) * 3
    return tuple(statistics.quantiles(values, n=4, method="inclusive"))


def size(count: float) -> str:
    """Bytes, to three digits or more.

    Example:
        >>> size(0), size(999), size(42_049_576), size(1_320_000)
        ('0 B', '999 B', '42.0 MB', '1.32 MB')
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.{2 if count < 10 * scale else 1}f} {unit}"
    return f"{count:.0f} B"


def title(results: Results, model: str) -> str:
    """The model and how large it is.

    Example:
        >>> title(Results(parameters={"mlp": 10512394}), "mlp")
        'mlp, 10.51 M parameters'
    """
    return f"{model}, {results.parameters[model] / 1e6:.2f} M parameters"


def progress(results: Results) -> str:
    """How far a measurement is.

    Example:
        >>> progress(Results({"rounds": 5, "exchanges": ["none"]}, turns={"mlp": {"limit": [[]]}}))
        'mlp: 1 of 10 turns'
    """
    model, contenders = list(results.turns.items())[-1]
    taken = sum(len(turns) for turns in contenders.values())
    total = results.setting["rounds"] * (1 + len(results.setting["exchanges"]))
    return f"{model}: {taken} of {total} turns"


def setting(results: Results) -> str:
    """Where and how it was measured, in a sentence."""
    found = results.setting
    return (
        f"{found['workers']} workers on {_hosts(found['ranks'])}; batch {found['batch_size']} per "
        f"worker, {found['rounds']} turns of {found['steps']} steps; {found['communicator']}; "
        f"TensorFlow {found['tensorflow']}, Keras {found['keras']}, dtk {found['dtk']}"
    )


def _hosts(ranks: Sequence[dict[str, Any]]) -> str:
    hosts = {rank["host"]: rank["cores"] for rank in ranks}
    cores = ", ".join(f"{host} ({count} cores)" for host, count in hosts.items())
    threads = " or ".join(map(str, sorted({rank["threads"] for rank in ranks})))
    return f"{cores}, threads per worker: {threads}"


def markdown(results: Results, saved: Results | None = None) -> str:
    """Everything, as a page of Markdown tables."""
    lines = []
    for model in results.turns:
        header, *rows = table(results, model, saved)
        lines += [f"### {title(results, model)}", "", _line(header), "|---" * len(header) + "|"]
        lines += [*map(_line, rows), ""]
    return "\n".join([*lines, *notes(results, saved), ""])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def notes(results: Results, saved: Results | None = None) -> list[str]:
    """What stands below the tables: how to read them, and the setting."""
    lines = [LEGEND, f"Setting: {setting(results)}."]
    if saved is not None:
        lines.append(f"{_COMPARED}: time of a step there / here. Saved: {setting(saved)}.")
    return lines

"""A job as one page of HTML that needs nothing else: its charts are SVG, made here."""

from __future__ import annotations

import datetime
import html
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from dtk.launch.events import Event, EventLog, RankName, Steps

Line: TypeAlias = list[tuple[float, float]]  # seconds since the job's start, value
_COLORS = ("#2563eb", "#ea580c", "#059669")
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 560, 220, 58, 10, 24
_POINTS = 600  # of a line
_ROWS = 100  # of what happened
_PARTS = {  # of a rank's time
    "computing": "#2563eb",
    "reading input": "#ca8a04",
    "sending": "#059669",
    "waiting for others": "#dc2626",
    "outside of steps": "#94a3b8",
}
_CURES = {  # where else than in this report to read on
    "computing": "more ranks, or faster ones, make it shorter",
    "reading input": "docs/data.md has what makes a pipeline faster",
    "sending": "docs/exchanges.md has what sends less",
    "waiting for others": "give slower ranks less other work",
    "outside of steps": "callbacks, and the script between two steps",
}
_STYLE = """
body { margin: 0 auto; max-width: 1240px; padding: 24px; background: #f8fafc; color: #0f172a;
  font: 14px/1.5 system-ui, sans-serif }
h1 { font-size: 20px; margin: 0; overflow-wrap: anywhere } h2 { font-size: 14px; margin: 0 0 8px }
main { display: grid; grid-template-columns: repeat(auto-fit, minmax(480px, 1fr)); gap: 16px }
section { background: #fff; border: 1px solid #e2e8f0; border-radius: 8px; padding: 14px }
.wide { grid-column: 1 / -1 } .bad { color: #dc2626 } .good { color: #059669 }
.facts { display: flex; flex-wrap: wrap; gap: 8px 30px; margin: 16px 0; color: #64748b }
.facts b { display: block; font-size: 20px } .facts b:not([class]) { color: #0f172a }
svg { width: 100%; height: auto; display: block } svg text { font-size: 11px; fill: #64748b }
polyline { fill: none; stroke-width: 2; stroke-linecap: round }
.restart { stroke: #dc2626; stroke-dasharray: 4 }
i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin: 0 5px 0 12px }
table { border-collapse: collapse; width: 100% } .bar { width: 45% }
td, th { text-align: left; padding: 3px 16px 3px 0; vertical-align: top; font-weight: normal;
  border-bottom: 1px solid #e2e8f0; overflow-wrap: anywhere }
th { color: #64748b; white-space: nowrap } th:first-child { width: 1% } th i { margin-left: 0 }
.bar span { display: inline-block; height: 14px; vertical-align: middle }
pre { margin: 0; white-space: pre-wrap; font-size: 12px }
td:nth-child(-n+3):not(:last-child) { white-space: nowrap }
"""


def page(log: EventLog) -> str:
    """Return the page."""
    start = log.kept[0]
    begun = start.time
    command = html.escape(f"dtk run {start.facts['command']}")
    tables = [(name, start.facts[name]) for name in ("settings", "versions")]
    rest = [_card(name.title(), _table(facts), wide=False) for name, facts in tables]
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{command}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{command}</h1>"
        f"<p><b>{html.escape(headline(log))}</b></p>{_facts(log, begun)}<main>"
        f"{_where_time_goes(log)}{''.join(_charts(log, begun))}{_happened(log, begun)}"
        f"{''.join(rest)}</main></body></html>\n"
    )


def headline(log: EventLog) -> str:
    """Return why the job failed, or what most of its ranks' time went to; "" if that is unknown."""
    told = [one for one in log.kept if one.kind in ("failure", "stall")]
    if log.kept[-1].facts["code"] != 0:
        return _why(told[-1]) if told else ""
    shares = _shares(log)
    if not shares:
        return ""
    mean = {name: sum(parts[name] for parts in shares.values()) / len(shares) for name in _PARTS}
    most = max(mean, key=lambda name: mean[name])
    return f"{mean[most]:.0%} of the time of training is {most}: {_CURES[most]}."


def _why(failure: Event) -> str:
    """Return the exception of the rank that failed, or else the first lines of what was told."""
    facts = failure.facts
    if "error" in facts:
        who = f"rank {failure.rank}" if isinstance(failure.rank, int) else failure.rank
        at = f" at {facts['file']}:{facts['line']}" if facts["file"] else ""
        raised = ": ".join(filter(None, (str(facts["error"]), str(facts["message"]))))
        return f"{who} failed{at}: {raised}"
    lines = [one.removeprefix("dtk: ") for one in str(facts["text"]).splitlines() if one.strip()]
    return " ".join(lines[: 1 + (failure.kind == "stall")])


def _shares(log: EventLog) -> dict[RankName, dict[str, float]]:
    """Return the parts of each rank's time, in the last attempt with steps."""
    attempt = max((one for one, _ in log.steps), default=0)
    waited = log.waited(attempt)
    return {
        rank: _parts(line, waited.get(rank, 0.0))
        for (one, rank), line in log.steps.items()
        if one == attempt
    }


def _facts(log: EventLog, begun: float) -> str:
    end, code = log.kept[-1], log.kept[-1].facts["code"]
    bad = f'<b class="bad">ended with {"an error" if code is None else code}</b>'
    told = [steps for (_, rank), line in log.steps.items() if rank == 0 for steps in line]
    number, sent = sum(one.number for one in told), sum(one.bytes for one in told)
    seconds = sum(one.elapsed for one in told) or 1.0
    held = max((one.memory for line in log.steps.values() for one in line), default=0)
    facts = {
        f"started {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(begun))}": "",
        "in all": _clock(round(end.time - begun)),
        "ranks with steps": f"{len({rank for _, rank in log.steps})}",
        "steps": f"{number:,.0f}",
        "samples/s of all ranks": f"{sum(one.samples or 0 for one in told) / seconds:,.0f}",
        "sent by rank 0 in a step": f"{sent / (number or 1) / 1e3:,.1f} kB",
        "most memory of a rank": f"{held / 1e6:,.0f} MB",
        "restarts": f"{sum(one.kind == 'restart' for one in log.kept)}",
    }
    result = '<b class="good">succeeded</b>' if code == 0 else bad
    shown = (f"<div>{f'<b>{v}</b>' if v else result}{name}</div>" for name, v in facts.items())
    return f'<div class="facts">{"".join(shown)}</div>'


def _where_time_goes(log: EventLog) -> str:
    """Return a bar for each rank of the last attempt with steps, of what its time went to."""
    attempt = max((one for one, _ in log.steps), default=0)
    waited, slowest, ranks = log.waited(attempt), log.slowest(attempt), _shares(log)
    heads = "".join(f"<th>{_key(color)}{name}</th>" for name, color in _PARTS.items())
    rows, working = "", 0.0
    for rank in sorted(ranks, key=lambda one: (isinstance(one, str), one)):
        parts = ranks[rank]
        working += (1.0 - parts["waiting for others"] - parts["sending"]) / len(ranks)
        bar = "".join(
            f'<span style="width:{100 * part:.2f}%;background:{_PARTS[name]}"></span>'
            for name, part in parts.items()
        )
        cells = "".join(f"<td>{part:.1%}</td>" for part in parts.values())
        rows += f'<tr><th>rank {rank}</th><td class="bar">{bar}</td>{cells}</tr>'
    told, most = "", max(waited.values(), default=0.0)
    if slowest is not None:
        told = f"Rank {slowest} was the slowest: others waited for it up to {most:.0%} of the time."
    elif waited:
        told = f"No rank was slow: none waited for more than {most:.1%} of the time."
    if waited:
        faster = f"{1 / max(working, 0.01):.2f} times as fast"
        told += f"</b> Efficiency {working:.0%}: equal work and instant links would be {faster}.<b>"
    table = f"<p><b>{told}</b></p><table><tr><th></th><th></th>{heads}</tr>{rows}</table>"
    return _card("Where the time of each rank goes", table if rows else "")


def _parts(told: Sequence[Steps], waiting: float) -> dict[str, float]:
    """Return the parts of a rank's time: its collectives may run while it computes."""
    elapsed = sum(one.elapsed for one in told)
    inside = sum(one.seconds for one in told) / elapsed
    between = sum(one.between or 0.0 for one in told) / elapsed
    parts = {
        "waiting for others": waiting,
        "sending": sum(one.communicating for one in told) / elapsed - waiting,
        "reading input": sum(one.input or 0.0 for one in told) / elapsed,
        "outside of steps": 1.0 - inside - between,
    }
    left, shares = 1.0, {}
    for name, part in parts.items():
        shares[name] = min(left, max(0.0, part))
        left -= shares[name]
    return {name: shares.get(name, left) for name in _PARTS}


def _charts(log: EventLog, begun: float) -> Iterator[str]:
    """Return the charts over time, of what there is."""
    restarts = [one.time - begun for one in log.kept if one.kind == "restart"]
    attempts = [line for (_, rank), line in log.steps.items() if rank == 0]

    def lines(value: str) -> list[Line]:
        points = [[(one.until - begun, getattr(one, value)) for one in line] for line in attempts]
        return [[(x, float(y)) for x, y in line if y is not None] for line in points]

    metrics: dict[str, dict[str, list[Line]]] = {"loss": {"after epochs": [[]]}}
    for event in log.kept:
        values = event.facts.get("metrics")
        for name, value in values.items() if isinstance(values, Mapping) else ():
            base = name.removeprefix("val_")
            series = "after epochs" if base == name else "validation"
            line = metrics.setdefault(base, {}).setdefault(series, [[]])[0]
            line.append((event.time - begun, value))
    metrics["loss"]["while training"] = lines("loss")
    for name, of_metric in metrics.items():
        yield _chart(name, of_metric, restarts, zero=False)
    yield _chart("learning rate", {"": lines("rate")}, restarts)
    yield _chart("global batch (rows)", {"": lines("batch")}, restarts)
    yield _chart("samples/s of all ranks", {"": lines("speed")}, restarts)


def _chart(
    title: str, series: Mapping[str, list[Line]], marks: Sequence[float], zero: bool = True
) -> str:
    """Draw lines over time; "" where there is nothing to draw."""
    points = [p for lines in series.values() for line in lines for p in line if _is_drawn(p)]
    if not points:
        return ""
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    left, right = (left, right) if left < right else (left - 1.0, right + 1.0)
    ys = [y for _, y in points] + [0.0] * zero
    ticks = _ticks(min(ys), max(*ys, min(ys) + 1e-3 * abs(min(ys)) + 1e-9))
    low, high = ticks[0], ticks[-1]

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - left) / (right - left) * (_WIDTH - _LEFT - 12)
        return _LEFT + across, _TOP + (high - y) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    drawn, keys = "", ""
    for tick in ticks:
        y = place(left, tick)[1]
        drawn += f'<path d="M{_LEFT} {y:.1f}H{_WIDTH}" stroke="#e2e8f0"/>'
        drawn += f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:.9g}</text>'
    for tick in (one for one in _ticks(left, right, 8) if left <= one <= right):
        x, y = place(tick, low)[0], _HEIGHT - 6
        drawn += f'<text x="{x:.1f}" y="{y}" text-anchor="middle">{_clock(tick)}</text>'
    for x in (place(mark, low)[0] for mark in marks if left <= mark <= right):
        drawn += f'<path class="restart" d="M{x:.1f} {_TOP}V{_HEIGHT - _BOTTOM}"/>'
    for color, (name, lines) in zip(_COLORS, series.items(), strict=False):
        keys += f"{_key(color)}{html.escape(name)}" if name else ""
        for line in lines:
            shown = list(filter(_is_drawn, line[:: max(1, len(line) // _POINTS)]))
            places = [place(x, y) for x, y in shown]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places + places[-1:])  # one is a dot
            drawn += f'<polyline points="{path}" stroke="{color}"/>'
    return _card(title, f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}">{drawn}</svg>{keys}', wide=False)


def _is_drawn(point: tuple[float, float]) -> bool:
    return abs(point[1]) < 1e30  # neither infinite nor NaN


def _ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return round numbers that span a range.

    >>> _ticks(0.0, 0.93)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    least = (high - low) / about * 0.99
    scale = 10.0 ** math.floor(math.log10(least))
    step = next(scale * one for one in (1, 2, 5, 10) if scale * one >= least)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(step * i, 12) for i in range(first, last + 1)]


def _happened(log: EventLog, begun: float) -> str:
    """Return a table of the events but for epochs, which charts show, and starts of ranks."""
    rows = ""
    shown = [one for one in log.kept[1:] if one.kind not in ("epoch", "rank start")]
    for event in shown[-_ROWS:]:
        told = ", ".join(f"{name}: {_short(value)}" for name, value in event.facts.items())
        told = html.escape(str(event.facts.get("text", told)))
        style = ' class="bad"' if "text" in event.facts else ""
        after = _clock(round(event.time - begun))
        rows += f"<tr><th>{after}</th><td{style}>{event.kind}</td>"
        rows += f"<td>{_short(event.rank)}</td><td><pre>{told}</pre></td></tr>"
    heads = "<tr><th>after</th><th>what</th><th>rank</th><th></th></tr>"
    return _card("What happened", f"<table>{heads}{rows}</table>")


def _card(title: str, inner: str, wide: bool = True) -> str:
    style = ' class="wide"' if wide else ""
    return f"<section{style}><h2>{html.escape(title)}</h2>{inner}</section>" if inner else ""


def _table(facts: object) -> str:
    items = facts.items() if isinstance(facts, Mapping) else ()
    named = ((name, html.escape(_short(value))) for name, value in items)
    cells = (f"<th>{name}</th><td>{value}</td>" for name, value in named if value)
    return f"<table><tr>{'</tr><tr>'.join(cells)}</tr></table>"


def _key(color: str) -> str:
    return f'<i style="background:{color}"></i>'


def _short(value: object) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)


def _clock(seconds: float) -> str:
    """Write a time.

    >>> _clock(28), _clock(28.5)
    ('0:00:28', '0:00:28.5')
    """
    text = str(datetime.timedelta(seconds=seconds))
    return text.rstrip("0") if "." in text else text

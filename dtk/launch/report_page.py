"""A job as one page of HTML that needs nothing else: its charts are SVG, made here."""

from __future__ import annotations

import functools
import html
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from dtk.launch.events import Event, EventLog, Steps

Line: TypeAlias = Sequence[tuple[float, float]]  # seconds since the job's start, value
_COLORS = ("#2563eb", "#ea580c", "#059669", "#9333ea", "#dc2626", "#0891b2", "#ca8a04", "#64748b")
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 560, 220, 58, 10, 24
_POINTS = 600  # of a line; a screen has no more
_LINES = 8  # of a chart
_DOTS = 100  # on a line
_PARTS = {  # of a rank's time
    "computing": "#2563eb",
    "reading input": "#ca8a04",
    "sending": "#059669",
    "waiting for others": "#dc2626",
    "outside of steps": "#94a3b8",
}
_TOLD = ("attempt start", "save", "failure", "stall", "restart", "rank end", "job end")
_ROWS = 60  # of what happened, the last ones
_STYLE = """
:root { color-scheme: light dark; --fg: #0f172a; --bg: #f8fafc; --card: #fff; --dim: #64748b;
  --line: #e2e8f0 }
@media (prefers-color-scheme: dark) { :root { --fg: #e2e8f0; --bg: #0f172a; --card: #1e293b;
  --dim: #94a3b8; --line: #334155 } }
body { margin: 0 auto; max-width: 1240px; padding: 24px; background: var(--bg); color: var(--fg);
  font: 14px/1.5 system-ui, sans-serif }
h1 { font-size: 20px; margin: 0; overflow-wrap: anywhere }
h2 { font-size: 14px; margin: 0 0 8px; font-weight: 600 }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(480px, 1fr)); gap: 16px;
  margin: 16px 0 }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 14px;
  min-width: 0 }
.wide { grid-column: 1 / -1 }
.facts { display: flex; flex-wrap: wrap; gap: 8px 40px; margin-top: 16px }
.facts b { display: block; font-size: 20px; font-weight: 600; font-variant-numeric: tabular-nums }
.dim, .facts span { color: var(--dim) }
.bad { color: #dc2626 } .good { color: #059669 }
svg { width: 100%; height: auto; display: block }
svg text { font: 11px system-ui, sans-serif; fill: var(--dim) }
.key i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 5px }
.key span { margin-right: 16px; white-space: nowrap }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
td, th { text-align: left; padding: 3px 16px 3px 0; vertical-align: top;
  border-bottom: 1px solid var(--line); font-weight: normal }
th { color: var(--dim); white-space: nowrap }
td.num { white-space: nowrap } td { overflow-wrap: anywhere }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font-size: 12px }
"""


def page(log: EventLog) -> str:
    """Return the page."""
    begun = min(_number(one, "time") for one in log.kept)
    start = next((one for one in log.kept if one["kind"] == "job start"), {})
    command = " ".join(["dtk run", *_words(start.get("command"))])
    cards = [_where_time_goes(log), *_charts(log, begun)]
    cards += [_failures(log, begun), _happened(log, begun)]
    cards += [_table(name.title(), start.get(name)) for name in ("settings", "versions")]
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(command)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{html.escape(command)}</h1>{_facts(log, begun)}"
        f'<div class="grid">{"".join(cards)}</div></body></html>\n'
    )


def slowest_told(log: EventLog) -> str:
    """Return a sentence about the rank that others waited for, in the last attempt with steps."""
    attempt = max(log.waiting, default=0)
    waited, slowest = log.waited(attempt), log.slowest(attempt)
    if not waited:
        return ""
    most = max(waited.values())
    if slowest is None:
        return f"No rank was slow: none waited for more than {most:.1%} of the time."
    return f"Rank {slowest} was the slowest: others waited for it up to {most:.0%} of the time."


def _facts(log: EventLog, begun: float) -> str:
    end = next((one for one in reversed(log.kept) if one["kind"] == "job end"), {})
    code, last = end.get("code"), max(_number(one, "time") for one in log.kept)
    result = (
        '<b class="good">succeeded</b>'
        if code == 0
        else (f'<b class="bad">ended with {"an error" if code is None else code}</b>')
    )
    told = [of_rank[-1] for of_rank in log.steps.values()]
    firsts = [steps for (_, rank), steps in log.steps.items() if rank == 0]
    everything = [one for steps in firsts for one in steps]
    seconds = sum(one.until - one.since for one in everything if one.samples is not None)
    samples = sum(one.samples or 0 for one in everything)
    count = sum(one.number for one in everything)
    facts = {
        "in all": _clock(last - begun),
        "ranks": str(len({rank for _, rank in log.steps}) or "-"),
        "steps of rank 0": f"{count:,}",
        "samples/s of all ranks": f"{samples / seconds:,.0f}" if seconds else "-",
        "sent by a rank in a step": _bytes(sum(one.bytes for one in everything) / (count or 1)),
        "most memory of a rank": _bytes(max((one.memory for one in told), default=0)),
        "restarts": str(sum(one["kind"] == "restart" for one in log.kept)),
    }
    rest = "".join(f"<div><b>{value}</b><span>{name}</span></div>" for name, value in facts.items())
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(begun))
    return f'<div class="facts"><div>{result}<span>started {when}</span></div>{rest}</div>'


def _where_time_goes(log: EventLog) -> str:
    """Return a bar for each rank of the last attempt, of what its time went to."""
    attempt = max((one for one, _ in log.steps), default=0)
    waited, rows = log.waited(attempt), ""
    for (number, rank), told in sorted(log.steps.items(), key=lambda one: str(one[0][1]).zfill(9)):
        if number == attempt:
            share = waited.get(rank, 0.0) if isinstance(rank, int) else 0.0
            parts = _parts(told, share)
            spans = "".join(
                f'<span title="{name}: {part:.1%}" style="width:{100 * part:.2f}%;'
                f'background:{_PARTS[name]}"></span>'
                for name, part in parts.items()
            )
            rows += f'<tr><th>rank {rank}</th><td class="bar">{spans}</td>' + "".join(
                f'<td class="num">{part:.1%}</td>' for part in parts.values()
            )
    if not rows:
        return ""
    heads = "".join(
        f'<th class="key"><i style="background:{color}"></i>{name}</th>'
        for name, color in _PARTS.items()
    )
    style = (
        "<style>.bar { width: 45% } .bar span { display: inline-block; height: 14px; "
        "vertical-align: middle }</style>"
    )
    told_of = f"<p><b>{slowest_told(log)}</b></p>" if slowest_told(log) else ""
    return (
        f'<div class="card wide">{style}<h2>Where the time of each rank goes</h2>{told_of}'
        f"<table><tr><th></th><th></th>{heads}</tr>{rows}</table></div>"
    )


def _parts(told: Sequence[Steps], waiting: float) -> dict[str, float]:
    """Return the parts of a rank's time: its collectives may run while it computes."""
    elapsed = sum(one.until - one.since for one in told) or 1.0
    inside = sum(one.seconds for one in told) / elapsed
    between = sum(one.between for one in told) / elapsed
    parts = {
        "waiting for others": waiting,
        "sending": sum(one.communicating for one in told) / elapsed - waiting,
        "reading input": sum(one.input or 0.0 for one in told) / elapsed,
        "outside of steps": 1.0 - inside - between,
    }
    left, found = 1.0, {}
    for name, part in parts.items():
        found[name] = min(left, max(0.0, part))
        left -= found[name]
    found["computing"] = left
    return {name: found[name] for name in _PARTS}


def _charts(log: EventLog, begun: float) -> Iterable[str]:
    """Return the charts over time, of what there is."""
    restarts = [_number(one, "time") - begun for one in log.kept if one["kind"] == "restart"]
    first = min((told[0].since - begun for told in log.steps.values()), default=0.0)
    draw = functools.partial(_chart, marks=restarts, left=first)
    of_rank: dict[str, list[Line]] = {}
    for (_, rank), told in log.steps.items():
        of_rank.setdefault(f"rank {rank}", []).append(
            [(one.until - begun, one.memory / 1e6) for one in told]
        )
    firsts = [told for (_, rank), told in log.steps.items() if rank == 0]

    def lines(value: str) -> list[Line]:
        values = [[(one, getattr(one, value)) for one in told] for told in firsts]
        return [[(o.until - begun, v) for o, v in told if v is not None] for told in values]

    metrics: dict[str, dict[str, list[Line]]] = {"loss": {"of the steps so far": lines("loss")}}
    for event in log.kept:
        if event["kind"] == "epoch" and isinstance(told_of := event["metrics"], Mapping):
            for name, value in told_of.items():
                base, series = str(name).removeprefix("val_"), "after epochs"
                series = "validation" if base != name else series
                found = metrics.setdefault(base, {}).setdefault(series, [[]])
                found[0] = [*found[0], (_number(event, "time") - begun, float(str(value)))]
    for name, series_of in metrics.items():
        yield draw(name, series_of, zero=False)
    yield draw("learning rate", {"": lines("rate")})
    yield draw("global batch (rows)", {"": lines("batch")})
    rates = [[(one.until - begun, _rate(one)) for one in told] for told in firsts]
    speeds = [[(x, rate) for x, rate in told if rate is not None] for told in rates]
    yield draw("samples/s of all ranks", {"": speeds})
    sent = [[(one.until - begun, one.bytes / one.number / 1e3) for one in told] for told in firsts]
    yield draw("kB sent by rank 0 in a step", {"": sent})
    if len(of_rank) > _LINES:  # those that hold most
        held = {name: max(y for line in lines for _, y in line) for name, lines in of_rank.items()}
        of_rank = {name: of_rank[name] for name in sorted(held, key=lambda name: -held[name])}
        of_rank = dict(list(of_rank.items())[:_LINES])
    yield draw("memory (MB)", of_rank)


def _rate(steps: Steps) -> float | None:
    elapsed = steps.until - steps.since
    return None if steps.samples is None or elapsed <= 0 else steps.samples / elapsed


def _chart(
    title: str,
    series: Mapping[str, Sequence[Line]],
    marks: Sequence[float],
    left: float,
    zero: bool = True,
) -> str:
    """Draw lines over time; "" where there is nothing to draw."""
    finite = {
        name: [[(x, y) for x, y in line if math.isfinite(y)] for line in lines]
        for name, lines in series.items()
    }
    points = [point for lines in finite.values() for line in lines for point in line]
    if not points:
        return ""
    ys = [y for _, y in points]
    low, high = min([0.0] * zero + ys), max(ys)
    if high <= low:
        low, high = low - (abs(low) or 1.0) * 0.1, high + (abs(high) or 1.0) * 0.1
    ticks = _ticks(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    right = max([x for x, _ in points])
    right = right if right > left else left + 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        inner = _HEIGHT - _TOP - _BOTTOM
        across = _LEFT + (x - left) / (right - left) * (_WIDTH - _LEFT - 8)
        return round(across, 1), round(_TOP + (high - y) / (high - low) * inner, 1)

    drawn = ""
    for tick in ticks:
        _, y = place(left, tick)
        drawn += f'<path d="M{_LEFT} {y}H{_WIDTH}" stroke="var(--line)"/>'
        drawn += f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{tick:.4g}</text>'
    for tick in (one for one in _ticks(left, right, 6) if left <= one <= right):
        x, _ = place(tick, low)
        drawn += f'<text x="{x}" y="{_HEIGHT - 6}" text-anchor="middle">{_clock(tick)}</text>'
    for mark in (one for one in marks if left <= one <= right):
        x, _ = place(mark, low)
        drawn += (
            f'<path d="M{x} {_TOP}V{_HEIGHT - _BOTTOM}" stroke="#dc2626" stroke-dasharray="4 3">'
            "<title>restart</title></path>"
        )
    for color, (name, lines) in zip(_COLORS * len(finite), finite.items(), strict=False):
        for line in lines:
            shown = line[:: max(1, len(line) // _POINTS)]
            path = " ".join(f"{x},{y}" for x, y in (place(*point) for point in shown))
            drawn += f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.6"/>'
            for point in shown if len(shown) <= _DOTS else ():
                x, y = place(*point)
                label = html.escape(f"{name} {point[1]:.5g} at {_clock(point[0])}".strip())
                drawn += f'<circle cx="{x}" cy="{y}" r="2.5" fill="{color}">'
                drawn += f"<title>{label}</title></circle>"
    keys = "".join(
        f'<span><i style="background:{color}"></i>{html.escape(name)}</span>'
        for color, name in zip(_COLORS * len(finite), finite, strict=False)
        if name
    )
    return (
        f'<div class="card"><h2>{html.escape(title)}</h2>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{drawn}</svg>'
        f'<div class="key dim">{keys}</div></div>'
    )


def _ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return round numbers that span a range.

    >>> _ticks(0.0, 0.93)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    raw = (high - low) / about
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(scale * one for one in (1, 2, 5, 10) if scale * one >= raw)
    first, last = math.floor(low / step), math.ceil(high / step - 1e-9)
    return [round(step * i, 12) for i in range(first, last + 1)]


def _failures(log: EventLog, begun: float) -> str:
    found = ""
    for event in log.kept:
        if event["kind"] in ("failure", "stall"):
            when = _clock(_number(event, "time") - begun)
            head = f"{event['kind']} after {when}, attempt {event['attempt']}"
            text = html.escape(str(event["text"]))
            found += f'<h2 class="bad">{html.escape(head)}</h2><pre>{text}</pre>'
    return f'<div class="card wide">{found}</div>' if found else ""


def _happened(log: EventLog, begun: float) -> str:
    rows = []
    for event in log.kept:
        if event["kind"] in _TOLD:
            when, rank = _clock(_number(event, "time") - begun), event["rank"]
            facts = {k: v for k, v in event.items() if k not in ("time", "attempt", "rank", "kind")}
            told = ", ".join(f"{name} {_short(value)}" for name, value in facts.items())
            told = str(facts.get("text", told))
            who = "" if rank is None else f"rank {rank}" if isinstance(rank, int) else rank
            cells = [when, who, str(event["kind"]), told.splitlines()[0] if told else ""]
            rows.append("".join(f"<td>{html.escape(str(one))}</td>" for one in cells))
    shown = "".join(f"<tr>{row}</tr>" for row in rows[-_ROWS:])
    return f'<div class="card wide"><h2>What happened</h2><table>{shown}</table></div>'


def _table(title: str, facts: object) -> str:
    if not isinstance(facts, Mapping) or not facts:
        return ""
    rows = "".join(
        f"<tr><th>{html.escape(str(name))}</th><td>{html.escape(_short(value))}</td></tr>"
        for name, value in facts.items()
        if value not in (None, "", ())
    )
    return f'<div class="card"><h2>{html.escape(title)}</h2><table>{rows}</table></div>'


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_short(one)}" for name, one in value.items())
    return " ".join(_words(value)) if isinstance(value, list | tuple) else str(value)


def _words(value: object) -> list[str]:
    return [str(one) for one in value] if isinstance(value, list | tuple) else []


def _number(event: Event, name: str) -> float:
    return float(str(event[name]))


def _clock(seconds: float) -> str:
    """Write a time.

    >>> _clock(0.25), _clock(75), _clock(4000)
    ('0.25 s', '1:15', '1:06:40')
    """
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _bytes(count: float) -> str:
    """Write a size.

    >>> _bytes(0), _bytes(19_200), _bytes(2.5e9)
    ('0 B', '19.2 kB', '2.5 GB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.3g} {unit}"

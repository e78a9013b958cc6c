"""Writes the page of what published scripts came to, see published_scripts.py."""

from __future__ import annotations

import collections
import re
from typing import Any

TITLE = """# Published scripts as they are: results

Written by `python tools/published_scripts.py --page tests/published/RESULTS.md`. The scripts are
those of other projects, at the commits below, and none of their text is here:
`tools/published_scripts.toml` says where each is and what is made small.

An automatic port adds dtk's three lines: the import, the strategy, and a scope around each
statement that compiles or loads a model. Where a statement of the script's top level makes or
removes folders, which two processes cannot do at once, rank 0 does so and the others wait, as dtk's
message says. Optimizers, networks and noise are the published ones. In both runs, with dtk and
without:

- data are small seeded stand-ins of the same shape, and at most two epochs are trained;
- one seed is set, and dropout drops nothing;
- a random number that is drawn inside a step is a function of its row, its place in the step and
  the step's number, since ranks draw others than one process, as they must;
- pretrained weights, which cannot be had, are random.

With dtk, BatchNormalization is synchronized, as dtk's documents ask for.

**Equal** means that both of two ranks end with the weights of all models, the histories and the
answers of `evaluate` and `predict` of plain Keras in one process. Computed in float64, each array
may differ by a relative 1e-6: what kinks of ReLU and divisions of Adam make of rounding is far
below that, and what is wrong is far above. Where a script does not run in float64, it is compared
in float32, and each array may differ by 1e-5, or ten times as much as in a plain run whose first
weights are 1e-7 apart. **Refused** is what ends with a message of dtk that says what to write, once
under the script's own error; **broken** is any other end, **silent** a difference or ranks that
train alone, **hangs** a run past its time.
"""
WAITING = """
## In the table, without a result: not run yet, or differences not yet explained
"""
NOT_COMPARED = """
## Not compared: plain Keras does not run them here, or rounding alone changes them by over 1 %
"""
ROW = "| {path} | {lines} | {end} | {double} | {single} | {detail} |"


def page(results: list[dict[str, Any]], commits: dict[str, str], waiting: list[str]) -> str:
    """Return the page.

    Args:
        results: Of each script, with its `entry` of the table.
        commits: Of each repository, by name.
        waiting: Paths of scripts in the table that have no result.
    """
    fit = [r for r in results if r["end"] != "unfit"]
    counts = collections.Counter(r["end"] for r in fit)
    told = ", ".join(
        f"{counts[end]} {end}" for end in ("equal", "refused", "broken", "silent", "hangs")
    )
    rows = [
        _row(r) for r in sorted(fit, key=lambda r: (r["entry"]["repository"], r["entry"]["path"]))
    ]
    left = [
        f"- `{r['entry']['path']}`: {_short(r['detail'])}" for r in results if r["end"] == "unfit"
    ]
    return (
        "\n".join(
            [
                TITLE,
                *(["| repository | commit |", "|---|---|"]),
                *(f"| {name} | {commit} |" for name, commit in commits.items()),
                f"\n## {len(fit)} scripts: {told}\n",
                "Lines are those added, changed and indented for dtk. Differences are the largest"
                " of any array.\n",
                "| script | lines | end | float64 | float32 | |",
                "|---|---|---|---|---|---|",
                *rows,
                *([WAITING, *(f"- `{path}`" for path in waiting)] if waiting else []),
                *([NOT_COMPARED, *left] if left else []),
            ]
        )
        + "\n"
    )


def _row(result: dict[str, Any]) -> str:
    entry, lines = result["entry"], result["lines"]
    counts = [
        f"{sign}{lines[name]}"
        for sign, name in (("+", "added"), ("~", "changed"), ("→", "indented"))
        if lines[name]
    ]
    detail = "" if result["end"] == "equal" else _short(result["detail"])
    if result.get("rounding"):
        detail = f"rounding alone: {_worst(result['rounding'])} {detail}".strip()
    return ROW.format(
        path=f"{entry['repository']} `{entry['path'].replace('site/en/', '')}`",
        lines=" ".join(counts),
        end=result["end"] if result["end"] == "equal" else f"**{result['end']}**",
        double=_worst(result.get("double")),
        single=_worst(result.get("single")),
        detail=detail,
    )


def _worst(found: dict[str, float] | None) -> str:
    return f"{max(found.values()):.0e}" if found else ""


def _short(text: str) -> str:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    plain = re.sub(r"(/[\w.+-]+)+/", "", plain)  # folders of the machine
    return " ".join(plain.split()).replace("|", "\\|")[:400]

"""Run published scripts as plain Keras and as two ranks of dtk, and say which end alike.

    python tools/published_scripts.py keras-io=/src/keras-io horovod=/src/horovod
    python tools/published_scripts.py keras-io=/src/keras-io --only mnist_convnet --keep /tmp/here

Given are folders where repositories are checked out, by the names that published_scripts.toml has
for them. Each script there is ported (`published_port.py`) and run (`published_run.py`) without dtk
and by `dtk run -n 2` in float64, where rounding is too small for kinks and for Adam to matter;
with --single in float32, too. Both ranks' weights, histories and answers of `evaluate` and
`predict` are compared with those of the one process. A script that does not run in float64 is
compared in float32, with what first weights 1e-7 apart make of each array. Some need pandas, and
those of keras-rs and keras-tcn their libraries.

A line is printed for each script, and results are kept in the folder `--keep`, a file for each;
`--page FILE` writes the page of all kept results. The exit code is 1 if a script is silently wrong,
hangs or breaks.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import published_page
import published_port

TOOLS = Path(__file__).resolve().parent
TABLE = TOOLS / "published_scripts.toml"
RELATIVE = 1e-5
# In float64.
DOUBLE = 1e-6
# What rounding of 1e-7 in the first weights makes of a number may be so many times exceeded: ranks
# round in every step.
ROUNDING = 10
# Where rounding makes more than this of a number, nothing can be told of a script.
CHAOS = 1e-2
# What dtk refuses with: its own errors, and those of what it was given.
REFUSALS = (
    "ValueError",
    "NotImplementedError",
    "NotDistributedError",
    "DisagreementError",
    "DtkError",
)
# What `dtk run` prints under an error of the script's that one process would not have met.
ADVICE = r"^dtk: every rank runs the whole script.*$"


def main() -> int:
    """Run the scripts that were asked for; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("repositories", nargs="*", help="NAME=FOLDER")
    parser.add_argument("--only", nargs="*", default=[], help="names of scripts")
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "published")
    parser.add_argument("--page", type=Path)
    parser.add_argument("--timeout", type=float, default=150)
    parser.add_argument("--jobs", type=int, default=1, help="scripts at a time")
    parser.add_argument("--single", action="store_true", help="in float32, too")
    parser.add_argument("--through", default="", help="a command that starts each run")
    options = parser.parse_args()
    folders = dict(given.split("=", 1) for given in options.repositories)
    table = tomllib.loads(TABLE.read_text())
    wanted = [
        entry
        for entry in table["script"]
        if entry["repository"] in folders and (not options.only or name_of(entry) in options.only)
    ]

    wanted.sort(key=lambda e: options.only.index(name_of(e)) if options.only else 0)

    def one(entry: dict[str, Any]) -> None:
        name = name_of(entry)
        result = tried(entry, Path(folders[entry["repository"]]), options)
        (options.keep / f"{name}.json").write_text(json.dumps(result, indent=1))
        print(f"{name}: {result['end']} {result['detail']}", flush=True)

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for future in [pool.submit(one, entry) for entry in wanted]:
            try:
                future.result()
            except (ValueError, SyntaxError, AssertionError) as error:
                print(f"not ported: {error!r}", flush=True)
    results = [
        json.loads(path.read_text()) | {"entry": entry}
        for entry in table["script"]
        if (path := options.keep / f"{name_of(entry)}.json").exists()
    ]
    waiting = [
        entry["path"]
        for entry in table["script"]
        if not (options.keep / f"{name_of(entry)}.json").exists()
    ]
    if options.page:
        options.page.write_text(published_page.page(results, table["commits"], waiting))
    return int(any(r["end"] in ("broken", "silent", "hangs") for r in results))


def name_of(entry: dict[str, Any]) -> str:
    """Return the name of a script's result: that of its file, where the table has no other."""
    return entry.get("name", Path(entry["path"]).stem)


def tried(entry: dict[str, Any], repository: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Port a script, run it in all ways, and return what came of it."""
    folder = options.keep / name_of(entry)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    text = published_port.source_of(repository / entry["path"])
    text = published_port.shrunk(text, entry.get("replace", []), entry.get("cut", []))
    text = published_port.telling(text, entry.get("epochs", 2))
    ported, lines = published_port.for_dtk(text, entry.get("whole", False))
    for old, new in entry.get("port", []):
        assert old in ported, old
        ported = ported.replace(old, new)
    (folder / "plain.py").write_text(published_port.plain(text))
    (folder / "dtk.py").write_text(ported)
    for name in ("plain", "dtk"):
        double = (folder / f"{name}.py").read_text().replace("float32", "float64")
        (folder / f"{name}64.py").write_text(double)
    return {"lines": lines, "detail": ""} | judged(entry, folder, options)


def judged(entry: dict[str, Any], folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run a script in the ways that it takes, and return its end and what shows it."""
    double = ["64"] if runs(run(entry, folder, ["plain64"], options)[0]) else []
    if not double or options.single:
        plain = run(entry, folder, ["plain"], options)[0]
        if not runs(plain):
            why = (
                f"{plain['kind']}: {plain['text'][:300]}"
                if plain["kind"]
                else plain["output"][-300:]
            )
            return {"end": "unfit", "detail": f"as plain Keras: {why}"}
    kinds = [*double, ""] if options.single or not double else double
    ranks = run(entry, folder, [f"dtk{kind}" for kind in kinds], options)
    if end := failed(ranks[0]):
        return end
    if not ranks[0]["steps"] and ranks[0]["updates"]:
        return {
            "end": "silent",
            "detail": "each rank trained on all rows, in a loop of the script's",
        }
    found = {kind: differences(folder, f"plain{kind}", f"dtk{kind}", 1) for kind in kinds}
    names = {"": "float32", "64": "float64"}
    detail = "; ".join(f"{names[kind]}: {told(found[kind])}" for kind in kinds)
    result = {"single": found.get(""), "double": found.get("64")}
    if double:
        if worst_of(found["64"]) <= DOUBLE:
            return result | {"end": "equal", "detail": detail}
        run(entry, folder, ["nudged64"], options)
        rounding = differences(folder, "plain64", "nudged64", 0)
        if worst_of(rounding) > CHAOS:
            apart = "by rounding alone, in float64 with first weights 1e-15 apart"
            return {"end": "unfit", "detail": f"{apart}: {told(rounding)}"}
        return result | {"end": "silent", "detail": detail}
    run(entry, folder, ["nudged"], options)
    rounding = differences(folder, "plain", "nudged", 0)
    if worst_of(found[""]) > RELATIVE and worst_of(rounding) > CHAOS:
        return {"end": "unfit", "detail": f"by rounding alone: {told(rounding)}"}
    over = {
        name: (off, rounding.get(name))
        for name, off in found[""].items()
        if not off <= max(RELATIVE, ROUNDING * rounding.get(name, 0))
    }
    detail = f"{detail}; by rounding alone: {told(rounding)}; {list(over.items())[:4]}"
    return result | {"rounding": rounding, "end": "silent" if over else "equal", "detail": detail}


def runs(how: dict[str, Any]) -> bool:
    """Whether a run without dtk came to its end."""
    return bool(how["ended"] and not how["kind"])


def run(
    entry: dict[str, Any], folder: Path, names: list[str], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Run a script in some ways, one after the other; return how each ended."""
    lines = []
    for name in names:
        here = folder / name
        here.mkdir()
        (here / "data.json").write_text(json.dumps(entry))
        script = folder / f"{name.replace('nudged', 'plain')}.py"
        command = [sys.executable, str(TOOLS / "published_run.py"), str(script), str(here)]
        command += ["--dtk"] * name.startswith("dtk") + ["--double"] * name.endswith("64")
        command += ["--nudge"] * name.startswith("nudged")
        if name.startswith("dtk"):
            command[1:1] = ["-m", "dtk.cli.main", "run", "-n", "2"]
        # Before it is ended, ranks that hang are named, with their stacks.
        stalled = f"DTK_STALL_TIMEOUT={options.timeout / 2:.0f}"
        bounded = ["timeout", "-k", "20", str(options.timeout), "env", stalled, *command]
        output = shlex.quote(str(folder / f"{name}.out"))
        lines.append(
            f"cd {shlex.quote(str(here))}; {shlex.join(bounded)} >{output} 2>&1; echo $? >code"
        )
    start = options.through.split() if names[0].startswith("dtk") else []
    subprocess.run(
        [*start, "sh", "-c", "\n".join(lines)],
        stdin=subprocess.DEVNULL,
        check=False,
        start_new_session=True,
    )
    return [ended(folder, name) for name in names]


def ended(folder: Path, name: str) -> dict[str, Any]:
    """Return how a run ended, by what it wrote down."""
    # Of the first rank that came to an end of its own: the others may have been ended for it.
    written = sorted((folder / name).glob("rank-*.json"))
    how = json.loads(written[0].read_text()) if written else {"kind": "", "text": "", "file": ""}
    output = (folder / f"{name}.out").read_text(errors="replace")
    return how | {
        "code": int((folder / name / "code").read_text()),
        "ended": bool(written),
        "output": output,
    }


def failed(ranks: dict[str, Any]) -> dict[str, Any]:
    """Return the end of a script that did not run through; empty if it did."""
    if ranks["code"] in (124, 137):
        return {"end": "hangs", "detail": ranks["output"][-300:]}
    if not ranks["code"] and ranks["ended"] and not ranks["kind"]:
        return {}
    advice = re.findall(ADVICE, ranks["output"], re.MULTILINE)
    by_dtk = advice or ("/dtk/" in ranks["file"] and ranks["kind"] in REFUSALS)
    said = ranks["text"].split("NotDistributedError: ")[-1]  # AutoGraph quotes the way there
    text = " ".join([*said.split(), *advice])[:600] or ranks["output"][-300:]
    return {
        "end": "refused" if by_dtk else "broken",
        "detail": f"{ranks['kind']}: {text}",
        "updates": ranks.get("updates"),
    }


def differences(folder: Path, plain: str, other: str, last: int) -> dict[str, float]:
    """Return how far each array of any rank is from the one process's, by its name."""
    wanted = loaded(folder / plain / "rank-0.npz")
    found: dict[str, float] = {}
    for rank in range(last + 1):
        mine = loaded(folder / other / f"rank-{rank}.npz")
        for name in wanted.keys() | mine.keys():
            both = name in wanted and name in mine
            off = apart(mine[name], wanted[name]) if both else float("inf")
            found[name] = max(off, found.get(name, 0))
    return found


def worst_of(found: dict[str, float]) -> float:
    """Return the largest difference; infinite where nothing was compared."""
    return max(found.values(), default=float("inf"))


def told(found: dict[str, float]) -> str:
    """Return the largest difference of each kind of number, in words."""
    kinds: dict[str, tuple[float, str]] = {}
    for name, off in found.items():
        kind, rest = name.split("/")[1], name.split("/", 2)[-1]
        kinds[kind] = max(kinds.get(kind, (-1.0, "")), (off, rest))
    return ", ".join(f"{kind} {off:.0e} ({name})" for kind, (off, name) in sorted(kinds.items()))


def loaded(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays that a run wrote down."""
    if not path.exists():
        return {}
    with np.load(path) as file:
        return dict(file)


def apart(mine: np.ndarray, wanted: np.ndarray) -> float:
    """Return the relative difference of two arrays; of those all but zero, the part of 0.1."""
    if mine.shape != wanted.shape:
        return float("inf")
    if np.array_equal(mine, wanted, equal_nan=True):
        return 0.0
    return float(np.linalg.norm(mine - wanted) / max(np.linalg.norm(wanted), 0.1))


if __name__ == "__main__":
    sys.exit(main())

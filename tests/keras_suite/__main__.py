"""Run Keras's own tests under dtk's strategies; docs/keras-tests.md says how, and what came out.

    python tests/keras_suite ../keras --ways mirrored local

A test counts if it passes in plain Keras. Each one that then fails under a strategy has its reason
in reasons.toml; the exit code is 1 if one has none, or passes though it has.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import files

HERE = Path(__file__).resolve().parent
# How many processes run a test together, where it is not one.
PROCESSES = {"collective": 2}
# A file of tests takes minutes; one that takes this long hangs.
LONGEST = 3600


def main() -> int:
    """Run the tests, print the tables."""
    args = _arguments()
    failures = tomllib.loads((HERE / "reasons.toml").read_text())["failure"]
    found: dict[str, dict] = {}
    for path in args.read:
        for way, results in json.loads(path.read_text()).items():
            found.setdefault(way, {}).update(results)
    if args.checkout is not None:
        _run_all(args, found)
    plain = {test for test, result in found["plain"].items() if result["outcome"] == "passed"}
    _print_counts(found, plain)
    ways = [way for way in found if way != "plain"]
    return int(sum(_print_failures(way, found[way], plain, failures) for way in ways) > 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run Keras's own tests under dtk's strategies.")
    parser.add_argument("checkout", nargs="?", type=Path, help="of Keras, at the tag installed")
    parser.add_argument("--ways", nargs="+", default=["mirrored"], help="also: local, collective")
    parser.add_argument("--files", nargs="+", default=files.ALL, help="some of them")
    parser.add_argument("-k", dest="only", metavar="EXPRESSION", help="as in pytest")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write how each ended")
    parser.add_argument("--read", type=Path, nargs="+", default=[], help="add to these results")
    parser.add_argument("--timeout", type=int, default=120, help="seconds a test may take")
    args = parser.parse_args()
    if args.checkout is None and not args.read:
        parser.error("which checkout of Keras?")
    return args


def _run_all(args: argparse.Namespace, found: dict[str, dict]) -> None:
    checkout = args.checkout.resolve()
    _check_version(checkout)
    for way in ("plain", *args.ways):
        for file in args.files:
            found.setdefault(way, {}).update(_run(checkout, file, way, args))
            if args.json is not None:
                args.json.write_text(json.dumps(found, indent=1))


def _check_version(checkout: Path) -> None:
    import keras

    scope: dict[str, Any] = {}
    text = (checkout / "keras/src/version.py").read_text()
    line = next(line for line in text.splitlines() if line.startswith("__version__"))
    exec(line, scope)
    if scope["__version__"] != keras.__version__:
        sys.exit(
            f"{checkout} is Keras {scope['__version__']}, but Keras {keras.__version__} is "
            f"installed; run `git -C {checkout} checkout v{keras.__version__}`"
        )


def _run(checkout: Path, file: str, way: str, args: argparse.Namespace) -> dict[str, dict]:
    """Run a file of tests; how each ended, by its name.

    Ranks that part in a test that fails cannot run another one together, so then the rest is run by
    new processes.
    """
    ended: dict[str, dict] = {}
    while True:
        before = len(ended)
        ended |= _run_once(checkout, file, way, args, ended)
        if PROCESSES.get(way, 1) == 1 or len(ended) == before:
            return ended


def _run_once(
    checkout: Path, file: str, way: str, args: argparse.Namespace, ended: dict
) -> dict[str, dict]:
    processes = PROCESSES.get(way, 1)
    command = ["-m", "pytest", "-q", "-p", "plugin", "-p", "no:cacheprovider", "-c", os.devnull]
    command += ["--import-mode=importlib", f"--rootdir={checkout}", f"--timeout={args.timeout}"]
    command += ["-k", args.only] if args.only else []
    command += [f"--deselect={test}" for test in ended]
    command += ["--exitfirst"] if processes > 1 else []
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "dtk.cli.main", "run", "-n", str(processes)]
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results")
        environment = os.environ | {
            "DTK_SUITE_WAY": way,
            "DTK_SUITE_RESULTS": str(results),
            "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])]),
        }
        print(f"{way}: {file}", file=sys.stderr)
        process = subprocess.Popen(
            [*launcher, *command, str(checkout / file)],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=LONGEST)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        ranks = [_read(Path(f"{results}.{rank}")) for rank in range(processes)]
        if not any(ranks) and process.returncode not in (0, 5):  # 5: no test was selected
            sys.exit(f"{file} could not be run:\n{output}")
    return {test: _joined([rank[test] for rank in ranks if test in rank]) for test in ranks[0]}


def _read(path: Path) -> dict[str, dict]:
    if not path.exists():
        return {}
    results = [json.loads(line) for line in path.read_text().splitlines()]
    return {result["test"]: result for result in results}


def _joined(ranks: list[dict]) -> dict:
    """How a test ended that ran on several ranks: it failed if it did on any."""
    failed = [result for result in ranks if result["outcome"] == "failed"]
    return (failed or ranks)[0]


def _print_counts(found: dict[str, dict], plain: set[str]) -> None:
    print("| | tests | passed | failed | skipped |\n|---|---|---|---|---|")
    for way, results in found.items():
        counted = results if way == "plain" else {t: r for t, r in results.items() if t in plain}
        outcomes = [result["outcome"] for result in counted.values()]
        row = [outcomes.count(outcome) for outcome in ("passed", "failed", "skipped")]
        print(f"| {way} | {len(outcomes)} | {' | '.join(map(str, row))} |")
        if way != "plain":
            ran = sum(result["runs"] > 0 for result in counted.values())
            print(f"| ... of them ran steps under the strategy | {ran} | | | |")


def _print_failures(way: str, results: dict, plain: set[str], failures: list[dict]) -> int:
    """Print what failed, by reason; returns how many tests ended otherwise than the reasons say."""
    failed = {t for t in plain if results.get(t, {}).get("outcome") != "passed"}
    print(f"\n{way}:\n\n| tests | whose | reason |\n|---|---|---|")
    explained: set[str] = set()
    for failure in failures:
        if way in failure["ways"]:
            expected = plain & set(failure["tests"])
            explained |= expected
            if expected & failed:
                names = ", ".join(_short(test) for test in sorted(expected & failed))
                print(f"| {names} | {failure['whose']} | {failure['reason']} |")
    for test in sorted(failed - explained):
        message = results.get(test, {}).get("message", "it did not end")
        print(f"| {_short(test)} | **new** | {' '.join(message.split())[:300]} |")
    for test in sorted(explained - failed):
        print(f"| {_short(test)} | **passes** | take it out of reasons.toml |")
    return len(failed ^ explained)


def _short(test: str) -> str:
    file, _, name = test.partition("::")
    return f"`{Path(file).stem.removesuffix('_test')}: {name.rpartition('::')[2]}`"


if __name__ == "__main__":
    sys.exit(main())

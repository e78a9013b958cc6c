"""Run the tests of tf_keras, Horovod and ChainerMN with dtk in their place.

    python tools/peer_suites tf-keras=../tf-keras horovod=../horovod chainer=../chainer

docs/peer-suites.md says how, and what came out. Each test that does not pass has its reason in
reasons.toml; the exit code is 1 if one has none, or a reason has no test.
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
from fnmatch import fnmatch
from pathlib import Path

HERE = Path(__file__).resolve().parent
KINDS = ("not there", "not comparable", "refused", "fails")
# A file of tests takes minutes; one that takes this long hangs.
LONGEST = 3000
Result = dict[str, str]


def main() -> int:
    """Run the suites, print what is new, write the page."""
    args = _arguments()
    suites = tomllib.loads((HERE / "suites.toml").read_text())
    found: dict[str, dict[str, Result]] = {}
    for path in args.read:
        for run, results in json.loads(path.read_text()).items():
            found.setdefault(run, {}).update(results)
    for name, folder in args.clones.items():
        for way in suites[name]["way"]:
            run = f"{name}: {way['name']}"
            if args.ways is None or way["name"] in args.ways:
                found.setdefault(run, {}).update(_run(name, folder, way, args))
                if args.json is not None:
                    args.json.write_text(json.dumps(found, indent=1))
    reasons = tomllib.loads((HERE / "reasons.toml").read_text()).get("reason", [])
    table, new = _tables(found, reasons)
    if args.only is not None or args.every > 1 or args.ways is not None:
        new = [line for line in new if not line.startswith("STALE")]  # they may be of the others
    print(table)
    if args.page is not None:
        head, mark, _ = args.page.read_text().partition("\n## Results\n")
        args.page.write_text(f"{head}{mark}\n{table}")
    print("\n".join(new), file=sys.stderr)
    return int(bool(new))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run other projects' tests with dtk.")
    parser.add_argument("clones", nargs="*", metavar="SUITE=FOLDER", help="which, and their clones")
    parser.add_argument("--ways", nargs="+", help="some of the ways to run them (suites.toml)")
    parser.add_argument("--only", metavar="EXPRESSION", help="some tests, as pytest's -k")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write how each ended")
    parser.add_argument("--read", type=Path, nargs="+", default=[], help="add to these results")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--every", type=int, default=1, help="3: of a test's parameters each third")
    parser.add_argument("--verbose", action="store_true", help="show what pytest prints")
    parser.add_argument("--timeout", type=int, default=90, help="seconds a test may take")
    args = parser.parse_args()
    pairs = [clone.partition("=") for clone in args.clones]
    args.clones = {name: Path(folder).resolve() for name, _, folder in pairs}
    return args


def _run(name: str, clone: Path, way: dict, args: argparse.Namespace) -> dict[str, Result]:
    """Run the tests one way; how each ended, by its name.

    Processes that part in a test cannot run another one together, so then new ones run the rest.
    """
    ended: dict[str, Result] = {}
    while True:
        found = _run_once(name, clone, way, args, list(ended))
        ended |= found
        if not found or not any(result.get("last") for result in found.values()):
            return ended


def _run_once(
    name: str, clone: Path, way: dict, args: argparse.Namespace, done: list[str]
) -> dict[str, Result]:
    command = ["-m", "pytest", "-q", "-p", "plugin", "-p", "no:cacheprovider", "-c", os.devnull]
    command += ["--import-mode=importlib", f"--rootdir={clone}", f"--timeout={args.timeout}"]
    command += ["--noconftest", "--timeout-method=thread", "--tb=short"]
    command += ["--continue-on-collection-errors"]
    files = {path for glob in way["files"] for path in clone.glob(glob)}
    files -= {path for glob in way.get("without", []) for path in clone.glob(glob)}
    command += sorted(map(str, files))
    command += ["-k", args.only] if args.only else []
    processes = way.get("processes", 1)
    launcher = [sys.executable]
    if "run" in way:
        launcher += ["-m", "dtk.cli.main", "run", *way["run"]]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "done").write_text("\n".join(done))
        environment = os.environ | way.get("environment", {})
        environment |= {
            "DTK_PEER": name,
            "DTK_PEER_CLONE": str(clone),
            "DTK_PEER_WAY": way["name"],
            "DTK_PEER_PROCESSES": str(processes),
            "DTK_PEER_EVERY": str(args.every),
            "DTK_PEER_RESULTS": folder,
            "PYTHONPATH": os.pathsep.join(
                [str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
            ),
        }
        print(f"{name}: {way['name']}: {len(done)} tests done", file=sys.stderr)
        process = subprocess.Popen(
            [*launcher, *command],
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
        if args.verbose:
            print(output, file=sys.stderr)
        found = _read(folder, processes, args.timeout)
        if not found and not done:
            sys.exit(f"{name} could not be run:\n{output}")
    return found


def _read(folder: str, processes: int, timeout: int) -> dict[str, Result]:
    """How each test ended: it failed if it did so, or did not end, in any process."""
    found: dict[str, Result] = {}
    for rank in range(processes):
        results, ended = Path(folder, f"results.{rank}"), {}
        for line in results.read_text().splitlines() if results.exists() else []:
            one = json.loads(line)
            if one["outcome"] == "started":
                one |= {"outcome": "failed", "message": f"no end in {timeout} s", "last": "yes"}
            ended[one.pop("test")] = one
        for test, one in ended.items():
            if one["outcome"] == "failed" or test not in found:
                found[test] = found.get(test, {}) | one
    return found


def _tables(found: dict[str, dict[str, Result]], reasons: list[dict]) -> tuple[str, list[str]]:
    """Return the page's tables, and a line for each test without a reason and the reverse."""
    new, counts = [], ["| | tests | pass | skipped | " + " | ".join(KINDS) + " |"]
    counts += ["|" + "---|" * (len(KINDS) + 4)]
    why: dict[int, dict[str, int]] = {}
    for run, results in found.items():
        suite, row = run.partition(":")[0], dict.fromkeys(("passed", "skipped", *KINDS), 0)
        for test, result in results.items():
            if result["outcome"] != "failed":
                row[result["outcome"]] += 1
                continue
            place = _reason(suite, run, test, result["message"], reasons)
            if place is None:
                row["fails"] += 1
                new.append(f"NEW {run}: {test}: {' '.join(result['message'].split())[-400:]}")
                continue
            row[reasons[place]["kind"]] += 1
            why.setdefault(place, {}).setdefault(run, 0)
            why[place][run] += 1
        counts.append(f"| {run} | {len(results)} | {' | '.join(map(str, row.values()))} |")
    lines = ["| tests | kind | reason |", "|---|---|---|"]
    for kind in KINDS:
        for place, reason in enumerate(reasons):
            if reason["kind"] == kind and place in why:
                where = ", ".join(f"{run} {count}" for run, count in why[place].items())
                lines.append(f"| {where} | {kind} | {' '.join(reason['reason'].split())} |")
    ran = {run.partition(":")[0] for run in found}
    new += [
        f"STALE {reason['suite']}: {reason['reason']}"
        for place, reason in enumerate(reasons)
        if reason["suite"] in ran and place not in why
    ]
    return "\n".join([*counts, "", *lines, ""]), new


def _reason(suite: str, run: str, test: str, message: str, reasons: list[dict]) -> int | None:
    message = " ".join(message.split())
    for place, reason in enumerate(reasons):
        if (
            reason["suite"] == suite
            and any(fnmatch(test, pattern) for pattern in reason.get("tests", ["*"]))
            and any(text in message for text in reason.get("messages", [""]))
            and any(way in run for way in reason.get("ways", [""]))
        ):
            return place
    return None


if __name__ == "__main__":
    sys.exit(main())

"""Break dtk's rules one by one, and say which breaks no test notices.

    python tools/mutants.py                  # all of tools/mutants.toml
    python tools/mutants.py codec scheduler  # those whose name or file contains a word
    python tools/mutants.py --jobs 2         # two at a time
    python tools/mutants.py --list

Each mutant is one change of a few characters. It is made in a copy of the checkout, and the tests
named beside it that `make test` has are run there until the first failure: one that passes them
survives, and is a rule that no test holds. The exit code is 1 if one survives, or does not apply
any more.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_suffix(".toml")
COPIED = ("dtk", "tests", "examples", "benchmarks", "docs", "tools", "setup.cfg", "README.md")
KILLED, SURVIVED, STALE = "killed", "SURVIVED", "DOES NOT APPLY"
MISUSED, NO_TEST_RAN = 4, 5
LONGEST = 900


class Mutant(NamedTuple):
    """A rule of dtk's, broken.

    Attributes:
        name: What breaks.
        file: Which file, from the root.
        find: What stands there, exactly once.
        replace: What stands there instead.
        tests: Arguments of pytest; some of these tests must fail.
    """

    name: str
    file: str
    find: str
    replace: str
    tests: list[str]


def main() -> int:
    """Try the mutants asked for, and print how each ended."""
    parser = argparse.ArgumentParser(description="Break dtk's rules one by one.")
    parser.add_argument("words", nargs="*", help="of names or files; all mutants without")
    parser.add_argument("--list", action="store_true", help="name them, try none")
    parser.add_argument("--jobs", type=int, default=1, help="mutants to try at a time")
    asked = parser.parse_args()
    mutants = [Mutant(**entry) for entry in tomllib.loads(LIST.read_text())["mutant"]]
    chosen = [m for m in mutants if not asked.words or any(w in f"{m}" for w in asked.words)]
    if asked.list:
        print(*(f"{m.file}: {m.name}" for m in chosen), sep="\n")
        return 0
    with concurrent.futures.ThreadPoolExecutor(asked.jobs) as pool:
        ended = list(pool.map(_try, chosen))
    print(f"{ended.count(KILLED)} of {len(ended)} killed")
    return int(set(ended) != {KILLED})


def _try(mutant: Mutant) -> str:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in COPIED:
            source = ROOT / name
            put = shutil.copytree if source.is_dir() else shutil.copy
            put(source, copy / name)
        for hidden in (".importlinter", "CONTRIBUTING.md", "ruff.toml"):
            shutil.copy(ROOT / hidden, copy / hidden)
        began = time.perf_counter()
        how = _change(copy / mutant.file, mutant) or _test(copy, mutant.tests)
    print(f"{how:8} {time.perf_counter() - began:4.0f} s  {mutant.file}: {mutant.name}", flush=True)
    return how


def _change(file: Path, mutant: Mutant) -> str | None:
    text = file.read_text() if file.exists() else ""
    if text.count(mutant.find) != 1:
        return STALE
    file.write_text(text.replace(mutant.find, mutant.replace))
    return None


def _test(copy: Path, tests: list[str]) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["-m", "not full", *tests]
    try:
        done = subprocess.run(
            command,
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
            timeout=LONGEST,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return KILLED  # what hangs is noticed
    if done.returncode in (MISUSED, NO_TEST_RAN):
        sys.exit(f"no test ran: pytest {' '.join(tests)}\n{(done.stdout + done.stderr)[-2000:]}")
    return SURVIVED if done.returncode == 0 else KILLED


if __name__ == "__main__":
    sys.exit(main())

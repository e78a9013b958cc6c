"""Let cosmic-ray break dtk at random, room by room, and count which breaks no test notices.

    python tools/mutants.py                             # a sample of every room
    python tools/mutants.py dtk/exchange --sample 20    # more of one
    python tools/mutants.py --seed 7                    # others

A mutant is one small change of the code: a comparison turned round, a number one larger, a loop
left out. cosmic-ray finds all that a room could have, and this draws some of them by a seed. Each
is made in a copy of the checkout, where the room's tests in mutants.toml are run, those that `make
test` has, until the first failure: a mutant that passes them all survives. Each room is a row of
benchmarks/results/mutations.md, with its survivors: a rule that no test holds, or a change that
changes nothing. The exit code is 1 if a room's tests fail before anything is broken.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import html
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

from cosmic_ray import commands
from cosmic_ray.modules import find_modules
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.work_db import use_db
from cosmic_ray.work_item import MutationSpec

ROOT = Path(__file__).resolve().parents[1]
TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
PAGE = ROOT / "benchmarks" / "results" / "mutations.md"
NOT_COPIED = (".git", ".venv", ".versions", ".*_cache", "__pycache__", "build")
PYTEST = (sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", "-m", "not full")
HEAD = """# Mutants that no test notices

```sh
make mutants
make mutants MUTANTS="dtk/exchange --sample 20 --seed 7"
```

cosmic-ray changes one operator, number, condition, loop or decorator of a room at a time, and the
room's tests in `tools/mutants.toml`, those of `make test`, are run until one fails. Mutants are
drawn by a seed: places first, and one of each place's changes. A row was recorded on the day that
it names. A survivor is a rule that no test holds, or a change that changes nothing.

| room | places | noticed | recorded | survivors |
|---|---|---|---|---|
"""


def main() -> int:
    """Try a sample of each room that is asked for, and write its row."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("rooms", nargs="*", default=list(TABLE["rooms"]))
    parser.add_argument("--sample", type=int, default=TABLE["sample"], help="mutants of each room")
    parser.add_argument("--seed", type=int, default=TABLE["seed"], help="which ones are drawn")
    asked = parser.parse_args()
    rows = {}
    for room in asked.rooms:
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "dtk"
            shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
            os.environ["PYTHONPATH"] = os.pathsep.join([str(copy), *sys.path[1:]])
            with contextlib.chdir(copy):
                rows[room] = _tried(room, asked.sample, asked.seed)
        if rows[room]:
            _write(room, rows[room])
    return int(not all(rows.values()))


def _tried(room: str, sample: int, seed: int) -> str:
    """Return a room's row; nothing if its tests fail as they are."""
    command = [*PYTEST, *shlex.split(TABLE["rooms"][room])]
    began = time.monotonic()
    whole = subprocess.run(command, capture_output=True, text=True, check=False)
    if whole.returncode:
        print(f"{room}: its tests fail as they are\n{whole.stdout[-2000:]}", flush=True)
        return ""
    longest = 3 * (time.monotonic() - began) + 60  # what makes tests hang is noticed, too
    generator, places = random.Random(seed), _mutants(room)
    chosen = generator.sample(places, min(sample, len(places)))
    survivors = []
    for mutant in map(generator.choice, chosen):
        result = mutate_and_test([mutant], shlex.join(command), longest)
        told = _told(mutant, result.diff or "")
        print(f"{room}: {told} {result.test_outcome}", flush=True)
        survivors += [] if result.is_killed else [told]
    today = datetime.datetime.now(tz=datetime.UTC).date()
    noticed = f"{len(chosen) - len(survivors)} of {len(chosen)}"
    return f"| `{room}` | {len(places)} | {noticed} | {today} | {'; '.join(survivors)} |"


def _mutants(room: str) -> list[list[MutationSpec]]:
    """Return the mutants of each place in a room, in an order that is the same each time."""
    with use_db(":memory:") as work:
        commands.init(sorted(find_modules([Path(room)])), work, {})
        found = [mutation for item in work.work_items for mutation in item.mutations]
    places = collections.defaultdict(list)
    for mutant in sorted(found, key=lambda m: (m.module_path, m.start_pos, m.operator_name)):
        if not re.fullmatch(TABLE["left_out"], mutant.operator_name):
            places[mutant.module_path, mutant.start_pos].append(mutant)
    return list(places.values())


def _told(mutant: MutationSpec, diff: str) -> str:
    """Return where a mutant is and what it changes, for one cell of a table."""
    lines = [line for line in diff.split("\n") if not line.startswith(("---", "+++"))]
    old, new = [
        " ".join(" ".join(line[1:] for line in lines if line.startswith(sign)).split())
        for sign in "-+"
    ]
    # Not in backticks: those of a page must be true of dtk, which a mutant is not.
    codes = [f"<code>{html.escape(one)}</code>".replace("|", "&#124;") for one in (old, new)]
    return f"{mutant.module_path}:{mutant.start_pos[0]} {' → '.join(codes)}"


def _write(room: str, row: str) -> None:
    """Put a room's row into the page, and leave the others."""
    lines = PAGE.read_text().splitlines() if PAGE.exists() else []
    rows = {line.split("`")[1]: line for line in lines if line.startswith("| `")} | {room: row}
    PAGE.write_text(HEAD + "\n".join(rows[name] for name in sorted(rows)) + "\n")


if __name__ == "__main__":
    sys.exit(main())

"""Test dtk with each TensorFlow, Keras and Python it supports: `make test-versions`.

    make test-versions ROWS="3.11/2.21.0/3.14.1"      one row of tools/versions.txt, or a few

Every row gets an environment of its own below .versions, with Horovod in none of them. There run
the fast tier of the tests, a job of two ranks that is compared with one process
(examples/digits_allreduce.py), and `dtk doctor`. docs/compatibility.md holds what came out; a row
that was not asked for keeps its line. Ends with 1 where a row has failed.
"""

from __future__ import annotations

import argparse
import configparser
import dataclasses
import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tools" / "versions.txt"
PAGE = ROOT / "docs" / "compatibility.md"
NIGHTLY = {"tensorflow": "tf-nightly", "keras": "keras-nightly"}
JOB = ("run", "-n", "2", "examples/digits_allreduce.py", "--epochs", "3")
HOURS = 3600.0
HEAD = """# What dtk was tested with

Written by `make test-versions`, which makes an environment for each line of
[tools/versions.txt](../tools/versions.txt). "tests" are those of `make test-fast`; tests that need
Horovod are skipped. "two ranks" is the largest relative difference between the weights of two ranks
and of one process (examples/digits_allreduce.py). A nightly is the newest of its day. dtk warns of
other versions before training, and `dtk doctor` fails for them.

| asked for | Python | TensorFlow | Keras | tests | two ranks | `dtk doctor` | on | machine |
|---|---|---|---|---|---|---|---|---|
"""


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        python: Such as "3.11".
        tensorflow: A version, or "nightly".
        keras: The same.
    """

    python: str
    tensorflow: str
    keras: str

    def __str__(self) -> str:
        return f"{self.python}/{self.tensorflow}/{self.keras}"

    def interpreter(self) -> str | None:
        """Find Python of this version: on the PATH, or one of pyenv's."""
        found = shutil.which(f"python{self.python}")
        shims = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
        own = sorted(shims.glob(f"{self.python}.*/bin/python"))
        return str(own[-1]) if own else found

    def requirements(self) -> list[str]:
        """Return what pip is to install, without dtk."""
        asked = {"tensorflow": self.tensorflow, "keras": self.keras}
        libraries = [
            NIGHTLY[name] if version == "nightly" else f"{name}=={version}"
            for name, version in asked.items()
        ]
        # A TensorFlow that is no nightly asks for "keras" by that name, see `install`.
        if self.keras == "nightly" != self.tensorflow:
            libraries.remove(NIGHTLY["keras"])
        return [*libraries, *of_tests()]


def rows() -> list[Row]:
    """Read tools/versions.txt."""
    lines = [line.split("#")[0].split() for line in TABLE.read_text().splitlines()]
    return [Row(*words) for words in lines if words]


def of_tests() -> list[str]:
    """Return what setup.cfg says that dtk and its tests need, without TensorFlow and Keras."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    needed = settings["options"]["install_requires"].splitlines()
    for extra in ("test", "examples"):
        needed += settings["options.extras_require"][extra].splitlines()
    lines = [line for line in needed if line and not line.startswith("#")]
    return [line for line in lines if not re.match(r"(tensorflow|keras)\b", line)]


def install(row: Row, interpreter: str, environment: Path) -> Path:
    """Make a row's environment, or bring it up to date.

    Returns:
        Its Python.
    """
    python = environment / "bin" / "python"
    if not python.exists():
        subprocess.run([interpreter, "-m", "venv", str(environment)], check=True)
    pip = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    pip += ["--upgrade-strategy", "only-if-needed", "--upgrade"]
    if row.keras == "nightly" != row.tensorflow:
        # Both are the package `keras`: the nightly's files have to be the last to be written.
        subprocess.run([*pip, *row.requirements(), "keras"], check=True)
        subprocess.run([*pip, "--force-reinstall", "--no-deps", NIGHTLY["keras"]], check=True)
    else:
        subprocess.run([*pip, *row.requirements()], check=True)
    subprocess.run([*pip, "--no-deps", "-e", str(ROOT)], check=True)
    return python


def versions(python: Path) -> tuple[str, str, str]:
    """Ask an environment for its Python, TensorFlow and Keras."""
    code = "import json, platform, tensorflow, keras; print(json.dumps("
    code += "[platform.python_version(), tensorflow.__version__, keras.__version__]))"
    asked = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    first, second, third = json.loads(asked.stdout.splitlines()[-1])
    return first, second, third


def test(python: Path, log: Path, workers: str, chosen: Sequence[str]) -> tuple[str, bool]:
    """Run the fast tier.

    Returns:
        How many tests passed, failed and were skipped; and whether none failed.
    """
    report = log.with_suffix(".xml")
    report.unlink(missing_ok=True)
    argv = [python, "-m", "pytest", "-n", workers, "-m", "fast and not full", *chosen]
    with log.open("w") as file:
        argv += ["-p", "no:cacheprovider", f"--junitxml={report}"]
        subprocess.run(argv, cwd=ROOT, stdout=file, stderr=file, timeout=6 * HOURS, check=False)
    if not report.exists():
        return "pytest ended", False
    suites = list(xml.etree.ElementTree.parse(report).getroot().iter("testsuite"))
    counts = {
        name: sum(int(suite.get(name, 0)) for suite in suites)
        for name in ("tests", "failures", "errors", "skipped")
    }
    failed = counts["failures"] + counts["errors"]
    passed = counts["tests"] - failed - counts["skipped"]
    told = f"{passed} passed, {failed} failed, {counts['skipped']} skipped"
    return told, failed == 0 and passed > 0


def two_ranks(python: Path, log: Path) -> tuple[str, bool]:
    """Run a job of two ranks, which compares itself with one process.

    Returns:
        The largest relative difference between weights; and whether the job succeeded.
    """
    argv = [python.with_name("dtk"), *JOB]
    ended = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=HOURS)
    log.write_text(ended.stdout + ended.stderr)
    found = re.search(r"largest relative difference (\S+)", ended.stdout)
    good = ended.returncode == 0 and found is not None
    return found[1] if found else f"exit code {ended.returncode}", good


def doctor(python: Path, log: Path) -> tuple[str, bool]:
    """Run `dtk doctor`.

    Returns:
        "ok" or what is broken; and whether nothing is.
    """
    argv = [python.with_name("dtk"), "doctor"]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=HOURS)
    log.write_text(ended.stdout + ended.stderr)
    if ended.returncode == 0:
        return "ok", True
    return (ended.stderr.strip().splitlines() or ["failed"])[-1].removeprefix("Error: "), False


def machine() -> str:
    """Describe the kind of machine this is."""
    model = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    cores = len(os.sched_getaffinity(0))
    name = model[1] if model else platform.machine()
    return f"{platform.system()}, {cores} cores of {name}"


def examine(row: Row, folder: Path, workers: str, chosen: Sequence[str]) -> tuple[str, bool]:
    """Test a row.

    Returns:
        Its line of the page, empty without its Python; and whether all went well.
    """
    interpreter = row.interpreter()
    if interpreter is None:
        print(f"  Python {row.python} is not installed: this row is left out, its line stays")
        return "", True
    python = install(row, interpreter, folder / str(row).replace("/", "-"))
    log = folder / f"{str(row).replace('/', '-')}.log"
    found = versions(python)
    results = [
        test(python, log, workers, chosen),
        two_ranks(python, log.with_suffix(".job.log")),
        doctor(python, log.with_suffix(".doctor.log")),
    ]
    for told, _ in results:
        print(f"  {told}")
    good = all(went_well for _, went_well in results)
    if not good:
        print(f"  what they said: {log} and beside it")
    return line(row, *found, *(told for told, _ in results)), good


def line(row: Row, *cells: str) -> str:
    """Return a row's line of the page."""
    return f"| {' | '.join([f'`{row}`', *cells, str(datetime.date.today()), machine()])} |\n"


def written(page: str) -> dict[str, str]:
    """Return the lines of the page, by what was asked for."""
    return {found[1]: found[0] for found in re.finditer(r"^\| `(\S+)` \|.*\n", page, re.MULTILINE)}


def write(known: Iterable[str], lines: dict[str, str]) -> None:
    """Put lines into the page, in the order of the table, and leave those of other rows."""
    lines = written(PAGE.read_text() if PAGE.exists() else "") | lines
    PAGE.write_text(HEAD + "".join(lines[name] for name in known if name in lines))


def main() -> int:
    """Test rows, and write each one's line when it is there."""
    parser = argparse.ArgumentParser(description="Test dtk with other TensorFlows and Keras.")
    parser.add_argument("rows", nargs="*", help="such as 3.11/2.21.0/3.14.1; all by default")
    parser.add_argument("--folder", type=Path, default=ROOT / ".versions", help="environments")
    parser.add_argument("--workers", default="0", help="how many pytest share the tests")
    parser.add_argument("--pytest", nargs=argparse.REMAINDER, default=[], help="more for pytest")
    given = parser.parse_args()
    known = {str(row): row for row in rows()}
    unknown = [name for name in given.rows if name not in known]
    if unknown:
        parser.error(f"{unknown[0]} is not in {TABLE.name}: expected one of {', '.join(known)}")
    given.folder.mkdir(exist_ok=True)
    write(known, {})  # a test of the documents wants the page
    failed = []
    for name in given.rows or known:
        print(name, flush=True)
        try:
            told, good = examine(known[name], given.folder.resolve(), given.workers, given.pytest)
        except subprocess.CalledProcessError as error:  # which has said why itself
            told, good = "", False
            print(f"  {' '.join(map(str, error.cmd[:4]))} ... ended with {error.returncode}")
        failed += [] if good else [name]
        if told and not given.pytest:  # some tests say nothing of the others
            write(known, {name: told})
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""A pytest plugin that notes what each test costs in CPU seconds, of its processes too.

    PYTHONPATH=tools pytest -p cpu_seconds --cpu-seconds costs.jsonl tests

Each line of the file is the name of a test and its CPU seconds; `python tools/cpu_seconds.py
costs.jsonl` adds them up by file. CPU seconds, unlike seconds, hardly depend on what else runs.
"""

from __future__ import annotations

import collections
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--cpu-seconds`."""
    parser.addoption("--cpu-seconds", type=Path, metavar="FILE", help="note CPU seconds of tests")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Note what a test and its fixtures have cost."""
    file = item.config.getoption("--cpu-seconds")
    if file is None:
        return (yield)
    before = _spent()
    result = yield
    with file.open("a") as lines:  # one write a line: workers of pytest-xdist share the file
        lines.write(json.dumps([item.nodeid, round(_spent() - before, 3)]) + "\n")
    return result


def _spent() -> float:
    """Of this process and all that it has started, those that have ended among them."""
    this = psutil.Process()
    return sum(map(_of, [this, *this.children(recursive=True)]))


def _of(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return times.user + times.system + times.children_user + times.children_system


def main(file: str) -> None:
    """Print the CPU seconds of each file of tests, and of all."""
    seconds: dict[str, list[float]] = collections.defaultdict(list)
    for line in Path(file).read_text().splitlines():
        test, spent = json.loads(line)
        seconds[test.split("::")[0]].append(spent)
    for name, spent in sorted(seconds.items(), key=lambda pair: -sum(pair[1])):
        print(f"{sum(spent):8.1f} {len(spent):5d}  {name}")
    every = [one for spent in seconds.values() for one in spent]
    print(f"{sum(every):8.1f} {len(every):5d}  all")


if __name__ == "__main__":
    main(sys.argv[1])

"""A pytest plugin that ports a suite while it is loaded, and writes down how each test ended.

`__main__.py` starts pytest with it. What it needs to know is in the environment:

    DTK_PEER, DTK_PEER_CLONE    which suite, and where it is
    DTK_PEER_WAY                how it is run: a name in suites.toml
    DTK_PEER_PROCESSES          how many processes run each test together
    DTK_PEER_EVERY              3: of a test's parameters each third
    DTK_PEER_RESULTS            a folder: what each process found, and which tests are done
"""

from __future__ import annotations

import importlib
import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import dtk
import pytest

FOLDER = Path(os.environ["DTK_PEER_RESULTS"])
EVERY = int(os.environ["DTK_PEER_EVERY"])
PROCESSES = int(os.environ["DTK_PEER_PROCESSES"])
# How much longer one process may need for a test than another.
PATIENCE = 20
PORT = importlib.import_module(f"{os.environ['DTK_PEER'].replace('-', '_')}_port")


def pytest_configure(config: pytest.Config) -> None:
    """Let what is imported from now on be ported."""
    PORT.install(Path(os.environ["DTK_PEER_CLONE"]), os.environ["DTK_PEER_WAY"])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what is done, and what the port cannot run."""
    done = (FOLDER / "done").read_text().splitlines()
    seen: Counter[str] = Counter()
    kept = []
    for item in items:
        if PORT.runs(item.name):
            function = f"{item.nodeid.rpartition('::')[0]}{re.split('_test_|[[]', item.name)[0]}"
            if seen[function] % EVERY == 0 and item.nodeid not in done:
                kept.append(item)
            seen[function] += 1
    items[:] = kept


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Write down a file that cannot be imported."""
    if report.failed:
        _write(_rank(), test=report.nodeid, outcome="failed", message=_message(report)[-3000:])


def _rank() -> int:
    return dtk.cluster.detect().rank


def _write(rank: int, **record: object) -> None:
    with open(FOLDER / f"results.{rank}", "a") as results:
        results.write(json.dumps(record) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Run a test; end if its processes did not end it alike."""
    rank, reports = _rank(), []
    _write(rank, test=item.nodeid, outcome="started")
    item.stash[_REPORTS] = reports
    result = yield
    outcomes = [report.outcome for report in reports]
    outcome = next((one for one in ("failed", "skipped") if one in outcomes), "passed")
    message = "\n".join(_message(report) for report in reports if report.outcome != "passed")
    (FOLDER / f"{_number(item)}.{rank}").write_text(outcome)
    alike = all(_outcome_of(item, other) == outcome for other in range(PROCESSES))
    last = {} if alike else {"last": "yes"}
    _write(rank, test=item.nodeid, outcome=outcome, message=message[-3000:], **last)
    if not alike:
        item.session.shouldstop = "the processes did not end this test alike"
    return result


_REPORTS = pytest.StashKey[list[pytest.TestReport]]()


def _number(item: pytest.Item) -> int:
    return item.session.items.index(item)


def _outcome_of(item: pytest.Item, rank: int) -> str | None:
    path, end = FOLDER / f"{_number(item)}.{rank}", time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if path.exists() and path.read_text():
            return path.read_text()
        time.sleep(0.01)
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Keep the report of each part of a test."""
    report = yield
    item.stash[_REPORTS].append(report)
    return report


def _message(report: pytest.TestReport | pytest.CollectReport) -> str:
    if isinstance(report.longrepr, tuple):  # a test that was skipped
        return str(report.longrepr[2])
    return str(report.longrepr)

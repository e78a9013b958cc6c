"""A pytest plugin that runs each test in the scope of a dtk strategy of its own.

`__main__.py` starts pytest with it, once for each file of Keras's tests and each way to run them.
What it needs to know is in the environment:

    DTK_SUITE_WAY       a name of `WAYS`
    DTK_SUITE_RESULTS   where a file gets a JSON object a line for every test; its name ends with
                        the rank
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dtk
import keras
import pytest
from keras.src.testing import TestCase

# How many calls to `strategy.run` the running test made: none says that it trained without dtk.
_RUNS = pytest.StashKey[int]()


def _mirrored() -> Any:
    return dtk.strategies.MirroredStrategy(devices=2)


def _local() -> Any:
    return dtk.strategies.AllReduceStrategy(communicator="local")


@functools.cache
def _collective() -> Any:
    # One for all tests of a process: ranks would have to agree on each new one.
    return dtk.strategies.AllReduceStrategy(communicator="collective")


WAYS: dict[str, Callable[[], Any] | None] = {
    "plain": None,
    "mirrored": _mirrored,
    "local": _local,
    "collective": _collective,
}


def pytest_configure(config: pytest.Config) -> None:
    """Look at what is tested; make devices before a file of tests makes TensorFlow start."""
    found, checkout = Path(keras.__file__).resolve(), config.rootpath.resolve()
    if checkout in found.parents:
        raise pytest.UsageError(f"Keras was imported from {checkout}, which is for its tests only")
    make = WAYS[os.environ["DTK_SUITE_WAY"]]
    if make is not None:
        make()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Function) -> Iterator[None]:
    """Run a test in a scope of its own.

    Keras's `TestCase.setUp` clears the session, and with it every scope entered; so it is entered
    just after, when a test's own `setUp` has yet to come, and left after its `tearDown`.
    """
    make, original, body = WAYS[os.environ["DTK_SUITE_WAY"]], TestCase.setUp, item.obj
    if make is None:
        return (yield)
    strategy, runs = make(), 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal runs
        runs += 1
        return type(strategy).run(strategy, *args, **kwargs)

    def set_up(test: TestCase) -> None:
        original(test)
        test.enterContext(_scope(strategy))

    @functools.wraps(body)
    def in_scope(*args: Any, **kwargs: Any) -> Any:
        with _scope(strategy):
            return body(*args, **kwargs)

    strategy.run = counted
    if isinstance(item.parent.obj, type) and issubclass(item.parent.obj, TestCase):
        TestCase.setUp = set_up
    else:
        item.obj = in_scope
    try:
        return (yield)
    finally:
        TestCase.setUp = original
        item.stash[_RUNS] = runs


@contextlib.contextmanager
def _scope(strategy: Any) -> Iterator[None]:
    with strategy.scope(), _without_xla():
        yield


@contextlib.contextmanager
def _without_xla() -> Iterator[None]:
    """While inside, `compile` leaves a `jit_compile=True` out, which takes long to compile.

    What such a test is about, mostly how `fit` reads some kind of data, is seen all the same.
    """
    owner = next(base for base in keras.Model.__mro__ if "compile" in vars(base))
    original = owner.compile

    @functools.wraps(original)
    def compile_without(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("jit_compile", None)
        original(self, *args, **kwargs)

    owner.compile = compile_without
    try:
        yield
    finally:
        owner.compile = original


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Write down how a test ended."""
    report = yield
    if report.when == "call" or report.outcome != "passed":
        outcome = {
            "test": item.nodeid,
            "outcome": report.outcome,
            "message": _message(report),
            "runs": item.stash.get(_RUNS, 0),
            "seconds": round(report.duration, 2),
        }
        rank = dtk.cluster.detect().rank
        with open(f"{os.environ['DTK_SUITE_RESULTS']}.{rank}", "a") as results:
            results.write(json.dumps(outcome) + "\n")
    return report


def _message(report: pytest.TestReport) -> str:
    if report.outcome == "passed":
        return ""
    if isinstance(report.longrepr, tuple):  # a test that was skipped
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(report.longrepr if crash is None else crash.message)

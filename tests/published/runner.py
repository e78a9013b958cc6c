"""Runs a published script as it stands, and returns what it came to.

Only the strategy is given to it: in a world, which has one already, that one; for the reference
none of dtk's, so that what it trains is plain Keras.
"""

from __future__ import annotations

import contextlib
import io
import os
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

SCRIPTS = Path(__file__).resolve().parent / "scripts"


class Failure(NamedTuple):
    """An exception that ended a script.

    Attributes:
        kind: Its class.
        text: What it says, notes included.
        file: Where it was raised.
    """

    kind: str
    text: str
    file: str


class Outcome(NamedTuple):
    """What a script came to.

    Attributes:
        result: Its `result`: weights and numbers; None if it failed.
        failure: What it failed with, if it did.
        updates: What each of its optimizers counted.
        errors: What it printed on standard error.
        output: What it printed on standard output.
    """

    result: dict | None
    failure: Failure | None
    updates: list[int]
    errors: str = ""
    output: str = ""


class Plain:
    """Stands for a strategy where there is none: its scope does nothing, and it is alone."""

    rank, size, is_chief = 0, 1, True

    def scope(self) -> Any:
        return contextlib.nullcontext()

    def __getattr__(self, name: str) -> Any:
        import tensorflow as tf

        return getattr(tf.distribute.get_strategy(), name)


def run_here(
    name: str,
    folder: str,
    may_fail: bool = False,
    consistency: str = "sync",
) -> Outcome:
    """Run a script in this world.

    Args:
        name: Its file's name, without `.py`.
        folder: Where it runs, on all ranks.
        may_fail: Return what it failed with. Otherwise raise it, as the script would, so that the
            world ends with it and no rank waits for this one.
        consistency: Of parameter servers, where the world has them.
    """
    from support import bodies

    served = os.environ["DTK_TEST_COMMUNICATOR"] == "served"
    strategy = bodies.served_with(consistency) if served else bodies.strategy()
    return _run(name, folder, strategy, may_fail)


def run_plain(name: str, folder: str) -> Outcome:
    """Run a script in this process, without dtk."""
    return _run(name, folder, Plain())


def run_alone(name: str, folder: str) -> Outcome:
    """Run a script in a world of one: for what of dtk's needs a strategy, such as callbacks."""
    from dtk.strategies import AllReduceStrategy

    return _run(name, folder, AllReduceStrategy("local"))


def files_in(folder: str) -> list[str]:
    """What a script has left, but for names that tell the time, and dtk's own file in an export."""
    paths = (str(path.relative_to(folder)) for path in Path(folder).rglob("*"))
    return sorted(path for path in paths if "tfevents" not in path and "assets.extra" not in path)


def _run(name: str, folder: str, strategy: Any, may_fail: bool = False) -> Outcome:
    import keras

    script = SCRIPTS / f"{name}.py"
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(script)}
    failure = None
    errors, output = io.StringIO(), io.StringIO()
    with (
        _inside(folder),
        _given(strategy),
        contextlib.redirect_stderr(errors),
        contextlib.redirect_stdout(output),
    ):
        try:
            exec(compile(script.read_text(), str(script), "exec"), names)
        except Exception as error:
            if not may_fail:
                raise
            failure = _told(error)
    result = None if failure else keras.tree.map_structure(_value, names["result"])
    models = [value for value in names.values() if isinstance(value, keras.Model)]
    return Outcome(result, failure, sorted(_updates(models)), errors.getvalue(), output.getvalue())


def _told(error: Exception) -> Failure:
    text = "\n".join([str(error), *getattr(error, "__notes__", [])])
    return Failure(type(error).__name__, text, traceback.extract_tb(error.__traceback__)[-1][0])


def _updates(models: list) -> list[int]:
    import keras

    optimizers = {
        id(value): value
        for model in models
        for value in vars(model).values()
        if isinstance(value, keras.optimizers.Optimizer)
    }
    return [int(optimizer.iterations.numpy()) for optimizer in optimizers.values()]


def _value(leaf: Any) -> Any:
    return leaf.numpy() if hasattr(leaf, "numpy") else leaf


@contextlib.contextmanager
def _inside(folder: str) -> Iterator[None]:
    """In a folder, which all ranks share; Keras's remarks, such as on `shuffle`, are no errors.

    Tracebacks are whole: by their end an error of dtk's is told from an accident.
    """
    import keras

    before = os.getcwd()
    os.chdir(folder)
    keras.config.disable_traceback_filtering()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.chdir(before)
        keras.config.enable_traceback_filtering()


@contextlib.contextmanager
def _given(strategy: Any) -> Iterator[None]:
    """While inside, `dtk.auto_strategy` is a strategy that is already there."""
    import dtk

    original = dtk.auto_strategy
    dtk.auto_strategy = lambda: strategy
    try:
        yield
    finally:
        dtk.auto_strategy = original

"""Runs a published script, and returns what it came to: in a world, in plain Keras, as a command.

A script is run as it stands. Only the strategy is given to it: in a world, which has one already,
that one; for the reference none of dtk's, so that what it trains is plain Keras.

    python tests/published/runner.py vae FOLDER          # the strategy of the environment
    dtk run -n 2 tests/published/runner.py vae FOLDER
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

SCRIPTS = Path(__file__).resolve().parent / "scripts"


class Outcome(NamedTuple):
    """What a script came to.

    Attributes:
        result: Its `result`: weights and numbers; None if it failed.
        error: Class and text of the exception it failed with; None if it did not.
        updates: What its optimizers counted.
        files: Names of the files in the folder it ran in, with `/` after those of folders.
    """

    result: dict | None
    error: tuple[str, str] | None
    updates: list[int]
    files: list[str]


class Plain:
    """Stands for a strategy where there is none: its scope does nothing, and it is alone."""

    rank, size, is_chief = 0, 1, True

    def scope(self) -> Any:
        return contextlib.nullcontext()

    def __getattr__(self, name: str) -> Any:
        import tensorflow as tf

        return getattr(tf.distribute.get_strategy(), name)


def run_here(name: str, folder: str, may_fail: bool = False) -> Outcome:
    """Run a script in this world.

    Args:
        name: Its file's name, without `.py`.
        folder: Where it runs, on all ranks.
        may_fail: Return what it failed with. Otherwise raise it, as the script would, so that the
            world ends with it and no rank waits for this one.
    """
    from strategies import bodies

    served = os.environ["DTK_TEST_COMMUNICATOR"] == "served"
    strategy = bodies.served_with("sync") if served else bodies.strategy()
    return _run(name, folder, strategy, may_fail)


def run_plain(name: str, folder: str) -> Outcome:
    """Run a script in this process, without dtk."""
    return _run(name, folder, Plain())


def run_alone(name: str, folder: str) -> Outcome:
    """Run a script in a world of one, which is plain Keras: for those that use dtk's callbacks."""
    from dtk.strategies import AllReduceStrategy

    return _run(name, folder, AllReduceStrategy("local"))


def _run(name: str, folder: str, strategy: Any, may_fail: bool = False) -> Outcome:
    import keras

    script = SCRIPTS / f"{name}.py"
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(script)}
    error = None
    with _alone_in(Path(folder)), _given(strategy):
        try:
            exec(compile(script.read_text(), str(script), "exec"), names)
        except Exception as raised:
            if not may_fail:
                raise
            notes = getattr(raised, "__notes__", [])
            error = type(raised).__name__, "\n".join([str(raised), *notes])
    models = [value for value in names.values() if isinstance(value, keras.Model)]
    return Outcome(
        keras.tree.map_structure(_value, names.get("result")) if error is None else None,
        error,
        sorted(updates_of(models)),
        sorted(_files(Path(folder))),
    )


def updates_of(models: list) -> list[int]:
    """How many updates each optimizer of some models has counted."""
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


def _files(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*"):
        yield str(path.relative_to(folder)) + "/" * path.is_dir()


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """In a folder, which all ranks share, with the settings a process starts with."""
    import keras

    before = os.getcwd()
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            yield
    finally:
        os.chdir(before)
        keras.config.set_floatx("float32")
        keras.mixed_precision.set_global_policy("float32")


@contextlib.contextmanager
def _given(strategy: Any) -> Iterator[None]:
    """While inside, `dtk.auto_strategy` is a strategy that is already there, if there is one."""
    import dtk

    original = dtk.auto_strategy
    if strategy is not None:
        dtk.auto_strategy = lambda: strategy
    try:
        yield
    finally:
        dtk.auto_strategy = original


def main(name: str, folder: str) -> None:
    """Run a script under the strategy the environment asks for, and write down its outcome."""
    from dtk.cluster import detect

    rank = detect().rank
    # every rank in one folder, and what it came to beside it
    outcome = _run(name, folder, None)
    Path(f"{folder}.{rank}").write_bytes(pickle.dumps(outcome))


if __name__ == "__main__":
    main(*sys.argv[1:])

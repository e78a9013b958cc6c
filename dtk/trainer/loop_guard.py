"""Refuse, in a job of several processes, optimizers applied outside `strategy.run`.

    rank 0   all rows -> gradients -> apply        the same N times, or N models that drift apart:
    rank 1   all rows -> gradients -> apply        nothing has summed the gradients

In a job of one process a script's own loop runs as without dtk.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import keras
import tensorflow as tf

from dtk.compat import keras_optimizers
from dtk.errors import NotDistributedError, at_rank
from dtk.trainer import fit_guard
from dtk.trainer.strategy import Strategy

_CONVERTED = "tf__"  # TensorFlow's prefix for the names of functions it has rewritten
_DTK = str(Path(__file__).parents[1])
_LIBRARIES = (_DTK, str(Path(keras.__file__).parent), str(Path(tf.__file__).parent))


def install() -> None:
    """Check every optimizer of this process from now on. Every new strategy calls this."""
    keras_optimizers.applies_through(_check)


def _check(optimizer: keras.Optimizer, variables: Sequence[keras.Variable]) -> None:
    strategy, current = fit_guard.joining_strategy(), tf.distribute.get_strategy()
    in_scope = tf.distribute.has_strategy()
    in_run = in_scope and not tf.distribute.in_cross_replica_context()
    if strategy is None or in_run:
        return
    owner, alone = keras_optimizers.optimizer_owner(optimizer), fit_guard.is_alone()
    if strategy.size > 1 and strategy.processes > 1 and not alone:
        _refuse(
            optimizer,
            f"in a job of {strategy.processes} processes: each would compute all rows of every "
            "batch, and nothing would sum their gradients",
            strategy,
        )
    if in_scope and owner is not current:
        _refuse(optimizer, "inside strategy.scope(), and was made outside it", strategy)
    if owner is current or optimizer.built or not variables:
        return
    replicas = owner.num_replicas_in_sync
    if replicas > 1 and not alone:
        _refuse(optimizer, f"with {replicas} replicas: one would compute all rows", strategy)
    with owner.scope():  # its variables must be made here; `apply` would build it outside
        optimizer.build(list(variables))


def _refuse(optimizer: keras.Optimizer, why: str, strategy: Strategy) -> None:
    raise NotDistributedError(
        at_rank(
            strategy.rank,
            f"optimizer {optimizer.name!r} was applied outside strategy.run, {why}. Make model, "
            "optimizer and metrics inside `with strategy.scope():`, and let strategy.run call the "
            f"step on each rank's rows:\n\n{_lines()}\n\n"
            "docs/strategies.md has a whole loop, and says what the loss is to be divided by. To "
            "train in this process alone, or where the script has summed the gradients itself, "
            "apply them inside `with dtk.strategies.undistributed():`",
        )
    )


def _lines() -> str:
    """Return the lines to write around the script's step."""
    found = _step(inspect.currentframe())
    step, arguments = found or ("train_step", ["batch"])
    name, given = step.rpartition(".")[2], ", ".join(arguments)
    packed = f"({given})" if len(arguments) > 1 else f"({given},)"
    lines = f"""
        train_set = strategy.experimental_distribute_dataset(train_set)

        @tf.function
        def distributed_{name}({given}):
            return strategy.run({step}, args={packed})

        for {given} in train_set:
            distributed_{name}({given})
        """
    lines = textwrap.dedent(lines).strip("\n")
    return lines if found else f"def {step}({given}): ...  # from the tape to apply\n\n{lines}"


def _step(frame: FrameType | None) -> tuple[str, list[str]] | None:
    """Return the outermost function of the script that was given a tensor, and its arguments."""
    found = None
    while frame is not None and frame.f_code.co_name != "<module>":
        code, values = frame.f_code, frame.f_locals
        arguments = list(code.co_varnames[: code.co_argcount])
        name = code.co_name.removeprefix(_CONVERTED)
        converted = "__autograph_generated_file" in code.co_filename
        own = name != code.co_name if converted else not code.co_filename.startswith(_LIBRARIES)
        given = tf.nest.flatten([values.get(argument) for argument in arguments])
        if own and name.isidentifier() and any(map(tf.is_tensor, given)):
            method = arguments[0] == "self"
            found = (f"self.{name}", arguments[1:]) if method else (name, arguments)
        frame = frame.f_back
    return found

"""Try what a model predicts of rows: of a row, it must not depend on the other rows."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from dtk.compat import keras_steps, random_draws, tf_replicas
from dtk.errors import NotDistributedError, at_rank
from dtk.input import slicing
from dtk.nests import Array, Tree
from dtk.trainer.replica import replica_step, step_metrics, whole_batch
from dtk.trainer.replica.comparing import tolerance_of
from dtk.trainer.replica.step_trial import Snapshot
from dtk.trainer.strategy import Strategy, tell


def check_predict(model: keras.Model, data: Tree, strategy: Strategy) -> None:
    """Raise on all ranks if what a model predicts of a row depends on other rows.

    Args:
        model: Built by its first prediction.
        data: This process's rows of a batch, which are predicted again, together and in two parts.
        strategy: Of all ranks.
    """
    rows = min(int(slicing.count_rows(data)), 5)
    difference = None
    if rows > 1:
        few = slicing.rows_of(replica_step.without_optionals(data), 0, rows)
        try:
            difference = _difference_of_predictions(model, few, rows, strategy)
        except Exception as why:  # it may be made for other numbers of rows, or for graphs alone
            untried = f"the predict_step of model {model.name!r} could not be tried on {rows} rows"
            tell(strategy, f"warning: {untried}: {type(why).__name__}: {str(why)[:200]}")
    shown = next(filter(None, strategy.world.allgather_object(difference)), None)
    if shown is not None:
        message = (
            f"what the predict_step of model {model.name!r} gives for a row depends on the other "
            f"rows, of which each of {strategy.num_replicas_in_sync} replicas has its own: "
            f"{shown}. Gather them by dtk.layers.gather_over_batch, or predict on each rank alone, "
            "inside `with dtk.strategies.undistributed():`"
        )
        raise NotDistributedError(at_rank(strategy.rank, message))


def _difference_of_predictions(
    model: keras.Model, few: Tree, rows: int, strategy: Strategy
) -> str | None:
    """Predict rows together and in two parts; return how the predictions differ, if they do."""
    before = Snapshot([*model.variables, *step_metrics.metric_variables(model)])
    half = rows - rows // 2

    def predicted(begin: int, end: int) -> Tree:
        random_draws.restart(end - begin, begin, rows, of_python=False)
        outputs = model.predict_step(slicing.rows_of(few, begin, end))
        before.restore()
        return outputs

    def differing(one: Tree, other: Tree) -> str | None:
        for value, its in zip(_arrays_in(one), _arrays_in(other), strict=True):
            if not _same_outputs(value, its, tolerance_of(model)):
                return f"{value.ravel()[:1]} with {rows} rows, and {its.ravel()[:1]} with a part"
        return None

    alone = tf_replicas.as_one_replica(strategy)
    by_row = random_draws.by_row(of_python=False)
    with alone, by_row, keras_steps.all_synchronized(model), whole_batch.noting_calls() as calls:
        whole, again = predicted(0, rows), predicted(0, rows)
        # It asks for other rows by itself, or draws in a way that no seed tells.
        if calls or differing(whole, again) is not None:
            return None
        parts = predicted(0, half), predicted(half, rows)
        return differing(whole, tf.nest.map_structure(slicing.join_rows, *parts))


def _arrays_in(outputs: Tree) -> list[Array]:
    return [np.asarray(one) for one in tf.nest.flatten(outputs, expand_composites=True)]


def _same_outputs(one: Array, other: Array, tolerance: float) -> bool:
    if one.shape != other.shape:
        return False
    if one.dtype.kind == "f":
        scale = tolerance * max(1.0, np.abs(one[np.isfinite(one)]).max(initial=0.0))
        return np.allclose(other, one, tolerance, scale, equal_nan=True)
    return np.mean(one != other) < 0.1  # rounding decides ties, as of argmax

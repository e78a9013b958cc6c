"""Refuse models made for a fixed number of rows: a worker has only its share of the rows."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import keras
import tensorflow as tf

from dtk.compat import keras_models
from dtk.errors import NotDistributedError, at_rank
from dtk.trainer.strategy import Strategy

# Words in TensorFlow's errors about shapes that do not match.
_OF_SHAPES = re.compile(r"shape|size|dimension|broadcast", re.IGNORECASE)


def check_stateful(model: keras.Model, rows: int | None, strategy: Strategy) -> None:
    """Refuse layers that keep a state for every row from one batch to the next."""
    size = strategy.num_replicas_in_sync
    stateful = [x for x in keras_models.layers_of(model) if getattr(x, "stateful", False)]
    if size == 1 or not stateful:
        return
    layer = stateful[0]
    batch = "a batch" if rows is None else f"a batch of {rows}"
    raise NotDistributedError(
        at_rank(
            strategy.rank,
            f"layer {layer.name!r} of model {model.name!r} has stateful=True: it keeps a state for "
            f"every row of {batch}, and each of {size} replicas computes a part of the rows. Make "
            f"it `keras.layers.{type(layer).__name__}(..., stateful=False)`, or train on one "
            "process, where it works as without dtk",
        )
    )


@contextlib.contextmanager
def explaining_failures(
    name: str, model: keras.Model, rows: int, strategy: Strategy
) -> Iterator[None]:
    """Return a context for a step tried on a few rows, which says what to do if the step fails.

    After an error about shapes, the model may be made for one batch size. Any other error is raised
    unchanged, since one process would raise it, too: labels that are out of range, for example.
    """
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        said, _, node = error.message.partition("[[")
        said = re.sub(r"\{\{.*?\}\}", "", said).strip()
        if not _OF_SHAPES.search(said):
            tried = f"the {name} of model {model.name!r} was tried on {rows} rows"
            error.add_note(at_rank(strategy.rank, tried))
            raise
        at = re.search(r"node ([^}]+)", node)
        advice = (
            "If the step takes a batch apart by its first axis, such as data[0] and data[1], let "
            "the dataset give a tuple of arrays instead: workers share the rows of that axis"
            if said.startswith("slice index")
            else "If the model is made for one size of batch, of which a worker computes only a "
            "part, write -1 or keras.ops.shape(x)[0] where that size stands"
        )
        raise NotDistributedError(
            at_rank(
                strategy.rank,
                f"{said}{f' (in {at[1]})' if at else ''}: the {name} of model {model.name!r} "
                f"failed on {rows} rows. {advice}",
            )
        ) from error

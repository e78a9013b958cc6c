"""Compare weights over all ranks when a script asks for it."""

from __future__ import annotations

import keras

from dtk.errors import at_rank
from dtk.trainer.model_scope import trainer_of
from dtk.trainer.ranks import rank_checks, shared_weights
from dtk.trainer.strategy import Strategy


def check_weights(model: keras.Model, strategy: Strategy) -> int:
    """Compare a model's weights over all replicas; see `DtkStrategy.check_weights`."""
    trainer = trainer_of(model)
    if trainer is None or trainer.strategy is not strategy:
        raise ValueError(
            at_rank(
                strategy.rank,
                f"model {getattr(model, 'name', model)!r} was not compiled under this strategy, "
                "which keeps no weights of it equal; compile it inside strategy.scope()",
            )
        )
    variables = trainer.equal_variables()
    # Compare number and shapes first: unequal ones cannot be compared by value. Paths are left out,
    # since they count the layers of a kind that a process has made, which may differ.
    shapes = [
        (f"variable {index} of model {model.name!r}", f"{rank_checks.whole_shape(v)} {v.dtype}")
        for index, v in enumerate(variables)
    ]
    count = (f"number of variables of model {model.name!r}", len(variables))
    if strategy.communicator.size > 1:
        rank_checks.compare([count, *shapes], strategy.communicator)
    shared_weights.check_same_weights(trainer, "when asked")
    return len(variables)

"""Comparing weights over all ranks when a script asks for it."""

from __future__ import annotations

from typing import Any

from dtk.errors import at_rank
from dtk.strategies import agreement
from dtk.strategies.adoption import adoption_of


def check_weights(model: Any, strategy: Any) -> int:
    """See `DtkStrategy.check_weights`."""
    adoption = adoption_of(model)
    if adoption is None or adoption.strategy is not strategy:
        raise ValueError(
            at_rank(
                strategy.rank,
                f"model {getattr(model, 'name', model)!r} was not compiled under this strategy, "
                "which keeps no weights of it equal; compile it inside strategy.scope()",
            )
        )
    variables = adoption.equal_variables()
    # What differs in number or shape cannot be compared by value. Paths hold how many layers of a
    # kind a process has made, which may differ.
    shapes = [
        (f"variable {index} of model {model.name!r}", f"{tuple(v.shape)} {v.dtype}")
        for index, v in enumerate(variables)
    ]
    count = (f"number of variables of model {model.name!r}", len(variables))
    if strategy.communicator.size > 1:
        agreement.compare([count, *shapes], strategy.communicator)
    agreement.check_same_weights(adoption, "when asked")
    return len(variables)

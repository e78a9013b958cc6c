"""What dtk's callbacks share: they belong to a model that a dtk strategy compiled."""

from __future__ import annotations

from typing import Any

import keras

from dtk.errors import NotDistributedError
from dtk.strategies.adoption import Adoption, adoption_of


class StrategyCallback(keras.callbacks.Callback):
    """A callback that needs the strategy of the model it runs with."""

    @property
    def adoption(self) -> Adoption:
        """What the strategy keeps about the model.

        Raises:
            NotDistributedError: The model was not compiled under a dtk strategy, so that this `fit`
                trains one process alone.
        """
        found = adoption_of(self.model)
        if found is None:
            raise NotDistributedError(
                f"{type(self).__name__}: model {self.model.name!r} was compiled outside a dtk "
                "strategy, so this fit is not distributed; call model.compile(...) inside "
                "`with strategy.scope():`"
            )
        return found

    @property
    def strategy(self) -> Any:
        """The strategy the model was compiled under."""
        return self.adoption.strategy

    def say(self, text: str) -> None:
        """Print one line, on rank 0 only."""
        if self.strategy.is_chief:
            print(f"{type(self).__name__}: {text}", flush=True)

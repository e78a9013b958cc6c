"""The state of a model trained over replicas: the variables ranks share, and each rank's own."""

from __future__ import annotations

import keras

from dtk.compat import keras_variables
from dtk.exchange.contract import SavedItem
from dtk.trainer.gradients import shared_optimizer
from dtk.trainer.strategy import Strategy


class ModelState:
    """The variables of a model and its optimizers: shared, equal, or of one rank.

    Attributes:
        same_data: Whether all ranks are given the same data, of which each takes its rows.
        metrics_of_all_rows: Metrics that one replica, or the chief, counts on the rows of all.
    """

    same_data = True

    def __init__(self, model: keras.Model, strategy: Strategy):
        self.model = model
        self.strategy = strategy
        self.metrics_of_all_rows: list[keras.Metric] = []
        self._carried: dict[str, SavedItem] = {}

    @property
    def has_local_steps(self) -> bool:
        """Whether replicas take local steps, so that weights are not equal after every step."""
        return any(one.local for one in shared_optimizer.gradient_exchanges_of(self.model))

    # State by rank.

    def seed_states(self) -> list[keras.Variable]:
        """Return the state of the model's random number generators (dropout and the like)."""
        return seed_states_of(self.model)

    def equal_variables(self) -> list[keras.Variable]:
        """Return every variable that steps keep equal on all ranks."""
        if not self.has_local_steps:
            return [v for v in self.shared_variables() if keras_variables.flat_shard_of(v) is None]
        rates = [
            v
            for optimizer in shared_optimizer.optimizers_of(self.model)
            for v in optimizer.variables
            if v.path.endswith("learning_rate")
        ]
        return [*self.model.weights, *rates]

    def agreed_variables(self) -> list[keras.Variable]:
        """Return the variables that ranks must agree on before steps.

        Seeds are among them, see `random_draws.apart`; slot variables that have come to differ by
        rank are not.
        """
        traced = any(one.is_traced for one in shared_optimizer.gradient_exchanges_of(self.model))
        variables = self.equal_variables() if traced else self.shared_variables()
        return [*variables, *self.seed_states()]

    def exchange_state(self) -> dict[str, SavedItem]:
        """Collect the gradient exchange's state of all ranks. All ranks call it together.

        A single process exchanges nothing and keeps the state that a larger job has saved.
        """
        return self._carried | {
            f"{i}/{name}": item
            for i, one in enumerate(shared_optimizer.gradient_exchanges_of(self.model))
            for name, item in one.state.collect(root=0).items()
        }

    def restore_exchange(self, state: dict[str, SavedItem]) -> None:
        """Restore the state of the gradient exchange."""
        gradient_exchanges = shared_optimizer.gradient_exchanges_of(self.model)
        self._carried = {} if gradient_exchanges else dict(state)
        for i, gradient_exchange in enumerate(gradient_exchanges):
            start = f"{i}/"
            mine = {k.removeprefix(start): v for k, v in state.items() if k.startswith(start)}
            gradient_exchange.state.restore(mine)

    def shared_variables(self) -> list[keras.Variable]:
        """Return every variable that ranks must agree on: weights and optimizer state."""
        optimizers = shared_optimizer.optimizers_of(self.model)
        for optimizer in optimizers:
            shared_optimizer.mark_slots(optimizer)
        own = {
            id(a) for optimizer in optimizers for a in shared_optimizer.accumulators_of(optimizer)
        }
        optimizer_variables = [v for optimizer in optimizers for v in optimizer.variables]
        unique = {id(v): v for v in [*self.model.weights, *optimizer_variables]}
        return [v for key, v in unique.items() if key not in own]


def seed_states_of(model: keras.Model) -> list[keras.Variable]:
    """Return the state of a model's random number generators."""
    weights = {id(v) for v in model.weights}
    others = [v for v in model.variables if id(v) not in weights]
    return [v for v in others if v.name == "seed_generator_state"]

"""Records the gradients that a worker's step hands to optimizers, which apply them afterwards.

So the step must not need the update. A step that hands over a weight's gradient and then reads the
weight expects the updated weight, which does not exist yet:

    d_optimizer.apply(gradients of the discriminator)      noted
    loss = loss_of(discriminator(generator(noise)))        reads the discriminator: refused

So a placeholder tensor replaces the weight after its gradient is handed over. If an operation
consumes the placeholder, the step has read the weight.
"""

from __future__ import annotations

from collections.abc import Collection

import keras
import tensorflow as tf

from dtk.compat import keras_variables
from dtk.errors import NotDistributedError
from dtk.nests import Gradients
from dtk.trainer.tracing.traced_step import NotedGradients


class RecordedUpdates(NotedGradients):
    """Gradients handed to optimizers by a step that is being traced."""

    def __init__(
        self, scope: keras.StatelessScope, model: keras.Model, tables: Collection[keras.Variable]
    ):
        super().__init__()
        self._scope, self._model = scope, model
        self._tables = {id(variable) for variable in tables}
        self._graph = tf.compat.v1.get_default_graph()
        # Every weight with a placeholder, and the optimizer that will update it. A weight that is
        # noted twice has two.
        self._waiting: list[tuple[keras.Variable, keras.Optimizer, tf.Tensor]] = []
        self._looked_up: set[int] = set()
        self.placeholders: dict[int, tf.Tensor] = {}

    def note(
        self, optimizer: keras.Optimizer, gradients: Gradients, variables: list[keras.Variable]
    ) -> None:
        """Record the gradients that an optimizer is to apply when the step is over."""
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise NotDistributedError(
                f"the train_step of model {self._model.name!r} calls {optimizer.name}.apply inside "
                "a branch, a loop or a function of the graph (tf.cond, tf.while_loop, "
                "tf.function); behind parameter servers a step hands over its gradients once, "
                "in any case. Call apply in train_step itself, without @tf.function, or use "
                "AllReduceStrategy"
            )
        super().note(optimizer, list(gradients), list(variables))
        for gradient, variable in zip(gradients, variables, strict=True):
            if gradient is not None:
                self._put_placeholder(variable, optimizer)

    def _put_placeholder(self, variable: keras.Variable, optimizer: keras.Optimizer) -> None:
        if id(variable) in self._tables:
            # Reading a table would fetch all of it. A step that reads this placeholder is refused.
            value = tf.zeros(variable.shape, keras_variables.stored(variable).dtype)
        else:
            now = self._scope.get_current_value(variable)
            value = tf.identity(keras_variables.stored(variable) if now is None else now)
        self.placeholders[id(variable)] = value
        self._waiting.append((variable, optimizer, value))
        self._scope.add_update((variable, value))

    def note_lookup(self, variable: keras.Variable) -> None:
        """Record that rows of a table are looked up."""
        if id(variable) in self.placeholders:
            self._looked_up.add(id(variable))

    def check(self, assigned: Collection[int]) -> None:
        """Refuse a traced step that reads weights after their update, or assigns them itself."""
        read = {
            id(variable): (variable, optimizer)
            for variable, optimizer, value in self._waiting
            if id(variable) in self._looked_up or value.consumers()
        }
        if not read:
            self._check_assigned(assigned)
            return
        variable, optimizer = next(iter(read.values()))
        others = f" (and {len(read) - 1} more)" if len(read) > 1 else ""
        raise NotDistributedError(
            f"the train_step of model {self._model.name!r} reads {variable.path!r}{others} after "
            f"it has handed the gradient to optimizer {optimizer.name!r}, so it needs its own "
            "update before the step is over. Behind parameter servers gradients are applied when "
            "the step is over: it would go on with the old weights, and train something else than "
            "one process does. Use AllReduceStrategy, where every worker updates inside the step "
            "(start with `dtk run -n 2 train.py`, without --ps); or compute every gradient before "
            "the first apply, if that is what you mean. A moving average of the weights is the "
            "optimizer's use_ema=True"
        )

    def _check_assigned(self, assigned: Collection[int]) -> None:
        by_hand = [v for v in self._model.trainable_variables if id(v) in assigned]
        if by_hand:
            raise NotDistributedError(
                f"a step of model {self._model.name!r} assigns {by_hand[0].path!r}, which is "
                "trainable, by itself. Behind parameter servers only optimizers change trainable "
                "weights, and what a step assigns would be lost. Give the weight a "
                "constraint (kernel_constraint= and the like), make it trainable=False, or use "
                "AllReduceStrategy"
            )

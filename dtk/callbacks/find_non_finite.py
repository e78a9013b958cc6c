"""Find the step, variables and rank where a loss or weights became NaN or infinite."""

from __future__ import annotations

import math

import keras
import tensorflow as tf

from dtk.callbacks.strategy_callback import StrategyCallback
from dtk.errors import NonFiniteError
from dtk.nests import Logs
from dtk.parameter_server.chief_trainer import ParameterServerTrainer
from dtk.trainer.gradients import shared_optimizer
from dtk.trainer.gradients.gradient_exchange import NonFinite

_NAMED = 3


class FindNonFinite(StrategyCallback):
    """End training at the first loss, gradient or weight that is NaN or infinite, and say where.

    A NaN in the rows of one rank reaches all ranks in the same step, since gradients are added up.
    So each step checks each rank's own gradients before the sum, in one pass and without sending
    anything. When the loss is not finite, or at the end of an epoch, ranks exchange their findings,
    and rank 0 names the step, the rank and the variables.

    If the loss is scaled (`LossScaleOptimizer`, mixed precision), overflowing gradients are not an
    error and not reported. Then only the loss counts.

    Behind parameter servers gradients do not pass the chief and are not checked. The chief checks
    loss and weights at the end of each epoch, and names the first step with a loss or metrics that
    were not finite, and its worker. If ranks take separate steps (`ModelAveraging` and the like),
    they exchange their findings at the end of an epoch.

    Args:
        action: "raise" ends training with an error on all ranks; "say" prints once and goes on.

    Raises:
        ValueError: Another action.
        NonFiniteError: During training, if something is not finite.

    Example:
        >>> import dtk, keras, numpy as np
        >>> strategy = dtk.strategies.AllReduceStrategy(communicator="local")
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, name="last")])
        ...     model.compile(optimizer="sgd", loss="mse")
        >>> history = model.fit(np.full((8, 4), np.nan), np.ones((8, 1)), verbose=0, callbacks=[
        ...     dtk.callbacks.FindNonFinite("say")])  # doctest: +ELLIPSIS
        FindNonFinite: epoch 1, step 1: the loss is nan; .../last/kernel, ... from rank 0, ...
    """

    def __init__(self, action: str = "raise") -> None:
        super().__init__()
        if action not in ("raise", "say"):
            raise ValueError(f"action must be 'raise' or 'say', got {action!r}")
        self.action = action
        self._watching = self._said = False

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Make dtk's own steps note gradients that are not finite."""
        exchanges = shared_optimizer.gradient_exchanges_of(self.model)
        # Logs differ between ranks that take separate steps.
        self._by_step = not (self.has_servers or any(e.local for e in exchanges))
        self._said, self._watching = False, bool(exchanges) and not self.has_servers
        self._watch(True)
        self._of_a_worker()  # drop the step that an earlier `fit` has left

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Note the epoch."""
        self._epoch, self._step = epoch, 0

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Check the loss, which is equal on all ranks."""
        self._step = batch + 1
        if self._by_step and not self._said and not math.isfinite(_loss_of(logs)):
            self._look(logs)

    def on_epoch_agreed(self, epoch: int, logs: Logs | None = None) -> None:
        """Check loss, weights, and gradients that did not reach either."""
        if not self._said:
            self._look(logs)

    def on_fit_left(self) -> None:
        """Stop noting gradients."""
        self._watch(False)
        self._watching = False

    def _watch(self, wanted: bool) -> None:
        exchanges = shared_optimizer.gradient_exchanges_of(self.model) if self._watching else []
        for exchange in exchanges:
            exchange.watch(wanted)
        if exchanges:
            self.model.make_train_function(force=True)

    def _look(self, logs: Logs | None) -> None:
        """Collect the findings of all ranks, and report them; all ranks call it together."""
        loss = _loss_of(logs)
        exchanges = shared_optimizer.gradient_exchanges_of(self.model)
        mine = [note for e in exchanges for note in e.non_finite(math.isfinite(loss))]
        notes = [n for of in self.strategy.world.allgather_object(mine) for n in of]
        weights = non_finite_weights(self.model)
        self._said = not math.isfinite(loss) or bool(notes or weights)
        if not self._said:
            return
        parts = ["" if math.isfinite(loss) else f"the loss is {loss:g}", weights]
        about = "; ".join(filter(None, parts)) or "the loss and all weights are finite"
        text = (
            f"epoch {self._epoch + 1}, step {self._step}: {about}{_origin(notes)}"
            f"{self._of_a_worker()}"
        )
        if self.action == "raise":
            raise NonFiniteError(text)
        self.say(text)

    def _of_a_worker(self) -> str:
        """Name the worker with the first loss or metric that was not finite."""
        trainer: object = self.trainer
        first = trainer.non_finite_step() if isinstance(trainer, ParameterServerTrainer) else None
        if first is None:
            return ""
        workers = ", ".join(f"worker {worker}" for worker in first.workers)
        return (
            f"; the first loss or metric that was not finite came from {workers}, in step "
            f"{first.step} of this training"
        )


def _loss_of(logs: Logs | None) -> float:
    loss = (logs or {}).get("loss")
    return 0.0 if loss is None else float(loss)


def non_finite_weights(model: keras.Model) -> str:
    """Say which weights hold NaN or infinite numbers; "" if none does."""
    paths = [
        v.path
        for v in model.trainable_variables
        if not bool(tf.reduce_all(tf.math.is_finite(tf.convert_to_tensor(v))))
    ]
    return f"{_named(paths)} hold NaN or infinite numbers" if paths else ""


def _origin(notes: list[NonFinite]) -> str:
    """Name the rank and the variables of the first gradients that were not finite."""
    if not notes:
        return ""
    first = min(note.step for note in notes)
    notes = [note for note in notes if note.step == first]
    paths = list(dict.fromkeys(path for note in notes for path in note.variables))
    ranks = sorted({(n.rank, n.replica) for n in notes})
    several = len(ranks) > len(dict(ranks))
    who = ", ".join(
        f"rank {rank}" + (f" (replica {replica})" if several or replica else "")
        for rank, replica in ranks
    )
    return (
        f"; the first gradients that were not finite came from {who}, in step {first + 1} of the "
        f"optimizer, for {_named(paths)}"
    )


def _named(paths: list[str]) -> str:
    more = len(paths) - _NAMED
    return ", ".join(paths[:_NAMED]) + (f" and {more} more" if more > 0 else "")

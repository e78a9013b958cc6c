"""The base of dtk's callbacks, for models compiled under a dtk strategy."""

from __future__ import annotations

from typing import TypeVar, cast

import keras

from dtk.errors import NotDistributedError
from dtk.strategies import ParameterServerStrategy
from dtk.strategies.dtk_strategy import DtkStrategy
from dtk.trainer.distributed_model import trainer_of
from dtk.trainer.distributed_trainer import DistributedTrainer

_Callback = TypeVar("_Callback", bound=keras.callbacks.Callback)


class StrategyCallback(keras.callbacks.Callback):
    """Callback that needs the strategy of its model.

    Methods take the arguments of `keras.callbacks.Callback`: `epoch` and `batch` are numbers from
    0, `logs` are loss and metrics by name. Besides Keras's methods, dtk calls `on_train_agreed` and
    `on_epoch_agreed` once all callbacks have seen the beginning of training or the end of an epoch
    and ranks were compared, `on_end_agreed` after training, and `on_fit_left` however `fit` ends.

    Attributes:
        sets: Names of the things that the callback sets while training, such as "batch size"; no
            two callbacks may set the same.
    """

    sets: tuple[str, ...] = ()

    def sets_here(self) -> tuple[str, ...]:
        """Return the names in `sets` that apply with the other callbacks of the running `fit`.

        Returns:
            Names as in `sets`.
        """
        return self.sets

    @property
    def trainer(self) -> DistributedTrainer:
        """The strategy's trainer of the model.

        Raises:
            NotDistributedError: The model was not compiled under a dtk strategy, so this `fit`
                trains in one process alone.
        """
        trainer = trainer_of(self.model)
        if trainer is None:
            raise NotDistributedError(
                f"{type(self).__name__}: model {self.model.name!r} was compiled outside a dtk "
                "strategy, so this fit is not distributed; call model.compile(...) inside "
                "`with strategy.scope():`"
            )
        return trainer

    @property
    def strategy(self) -> DtkStrategy:
        """The strategy that the model was compiled under."""
        # Only dtk strategies make trainers; the trainer itself knows them as a protocol.
        return cast(DtkStrategy, self.trainer.strategy)

    @property
    def has_servers(self) -> bool:
        """Whether workers compute behind parameter servers."""
        return isinstance(self.strategy, ParameterServerStrategy)

    def check_sole(self) -> None:
        """Check that no other dtk callback sets the same as this one.

        Raises:
            ValueError: Another callback sets the same.
        """
        for other in self.beside(StrategyCallback):
            common = [what for what in other.sets_here() if what in self.sets_here()]
            if common and other is not self:
                raise ValueError(
                    f"{type(self).__name__} and {type(other).__name__} would set the same "
                    f"{common[0]}; keep one"
                )

    def beside(self, kind: type[_Callback]) -> list[_Callback]:
        """Return the callbacks of a class in the running `fit`, this one included.

        Args:
            kind: The class.

        Returns:
            The callbacks, in the order in which Keras calls them.
        """
        return [one for one in self.trainer.callbacks.callbacks if isinstance(one, kind)]

    def batch_size_or_fits(self, batch_size: int | None) -> int:
        """Return the given global batch size, or else the running `fit`'s.

        Args:
            batch_size: The size in rows, or None.

        Returns:
            The global batch size, in rows.

        Raises:
            ValueError: Neither is known.
        """
        size = batch_size or self.trainer.feed.batch_size()
        if size is None:
            raise ValueError(
                f"{type(self).__name__}: fit's data does not tell its batch size; give batch_size="
            )
        return size

    def say(self, text: str) -> None:
        """Print one line, on rank 0 only.

        Args:
            text: The line, without the callback's name.
        """
        if self.strategy.is_chief:
            print(f"{type(self).__name__}: {text}", flush=True)


class SavedCallback(StrategyCallback):
    """Callback with attributes that `Checkpoint` saves: `_seen` under the name "seen".

    Attributes:
        saved: Names of the attributes, without the underscore.
    """

    saved: tuple[str, ...] = ()

    def get_state(self) -> dict[str, object]:
        """Return what `Checkpoint` saves, by name."""
        return {name: getattr(self, f"_{name}") for name in self.saved}

    def set_state(self, state: dict[str, object]) -> None:
        """Go on from a checkpoint's state; the optimizer's rate is already restored.

        Args:
            state: The result of `get_state`.
        """
        for name in self.saved:
            setattr(self, f"_{name}", state[name])


def count_rows(model: keras.Model) -> int:
    """Return the rows that a model's metrics have seen since they were reset, over all ranks.

    Keras weights the mean of its losses by rows, and so counts them, in float32: exact up to 2^24.
    """
    trackers = [m for m in model.metrics if isinstance(m, keras.metrics.Mean) and m.name == "loss"]
    own = any(
        getattr(type(model), name) is not getattr(keras.Model, name)
        for name in ("train_step", "test_step")
    )
    if own or not trackers:
        raise ValueError(
            f"to count the rows of this data dtk needs Keras's own mean of the loss, which model "
            f"{model.name!r} may not keep, since it has a train_step or test_step of its own; give "
            "fit arrays, also as validation data"
        )
    # Restored metric state is divided among ranks, so the sum may not be a whole number.
    return round(float(keras.ops.convert_to_numpy(trackers[0].count)))

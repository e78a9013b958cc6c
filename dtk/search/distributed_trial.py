"""A trial that all ranks take part in; to an objective it looks like `optuna.Trial`."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Sequence
from typing import TypeVar

import keras
import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from dtk.errors import DisagreementError, at_rank
from dtk.nests import Logs
from dtk.search.rounds import Failure, RoundMessage, Rounds, agreed

_Value = TypeVar("_Value")
Choice = None | bool | int | float | str
# The method of a trial that suggests a value of a distribution.
SUGGEST: dict[type[BaseDistribution], str] = {
    CategoricalDistribution: "suggest_categorical",
    FloatDistribution: "suggest_float",
    IntDistribution: "suggest_int",
}


@dataclasses.dataclass(frozen=True)
class Start:
    """What every rank is told of a trial when it begins."""

    number: int  # of the trial
    datetime_start: datetime.datetime | None  # when rank 0 began it
    user_attrs: dict[str, object]  # what is known of it already, such as by `enqueue_trial`
    seed: int  # what its random numbers are drawn from


class DistributedTrial(optuna.trial.FixedTrial):
    """A trial of a study that rank 0 owns; objectives written for `optuna.Trial` work unchanged.

    `suggest_*` and `should_prune` are answered by rank 0: **every rank calls them, in the same
    order**, and ranks that do not are told so. `report`, `set_user_attr` and `set_constraint` write
    on rank 0 and are free elsewhere; properties are known on every rank, where Optuna's
    `FixedTrial` keeps them.

    When one rank leaves the objective by an exception, the others raise the same at the next thing
    they do with the trial, or where `fit`, `evaluate`, `predict` or an epoch begins or ends.

    Args:
        start: What all ranks know of the trial.
        trial: Optuna's, on rank 0.
        rounds: How ranks talk.
        catch: Classes of exceptions after which the study goes on.

    Attributes:
        ended: The exception that has ended the trial on all ranks.
        root: Where it comes from.
    """

    def __init__(
        self,
        start: Start,
        trial: optuna.Trial | None,
        rounds: Rounds,
        catch: tuple[type[Exception], ...] = (),
    ):
        super().__init__({}, start.number)
        self._datetime_start, self._user_attrs = start.datetime_start, dict(start.user_attrs)
        self.ended: Exception | None = None
        self.root: Failure | None = None
        self._start, self._trial = start, trial
        self._rounds, self._catch = rounds, catch

    def _suggest(self, name: str, distribution: BaseDistribution) -> Choice:
        """Ask rank 0; all `suggest_*` of `FixedTrial` come here."""
        how, settings = SUGGEST[type(distribution)], vars(distribution)
        told = ", ".join([repr(name), *(f"{key}={value}" for key, value in settings.items())])
        self._params[name] = self._ask(
            f"{how}({told})", lambda trial: getattr(trial, how)(name, **settings)
        )
        return super()._suggest(name, distribution)

    def should_prune(self) -> bool:
        """Return whether to end the trial, by what was reported; the same on every rank."""
        return self._ask("should_prune()", lambda trial: bool(trial.should_prune()))

    # Written on rank 0.

    def report(self, value: float, step: int) -> None:
        """Report an intermediate value; that of rank 0 is kept."""
        float(value), int(step)  # so that what rank 0 would raise is raised by all
        if self._trial is not None:
            self._trial.report(value, step)

    def set_user_attr(self, key: str, value: object) -> None:
        """Keep something with the trial; what rank 0 gives is stored."""
        if self._trial is not None:
            self._trial.set_user_attr(key, value)
        super().set_user_attr(key, value)

    def set_constraint(self, key: str, value: float) -> None:
        """Set a constraint, which holds where it is 0 or less; that of rank 0 is kept."""
        if self._trial is not None:
            self._trial.set_constraint(key, value)
        super().set_constraint(key, value)

    @property
    def seed(self) -> int:
        """The random seed of the trial, equal on all ranks."""
        return self._start.seed

    @property
    def study(self) -> optuna.Study:
        """The study, which only rank 0 has.

        Raises:
            RuntimeError: On other ranks.
        """
        if self._trial is None:
            message = (
                "trial.study: the study is on rank 0 alone, and ranks must not decide by what "
                "only one knows; use callbacks of dtk.search.optimize, which run on rank 0"
            )
            raise RuntimeError(at_rank(self._rounds.rank, message))
        return self._trial.study

    # The end.

    def arrive(self, where: str) -> None:
        """Let ranks tell each other that one of them has failed. Every rank calls it.

        `fit` does where it begins and around its epochs; a loop of the script's own may do so where
        no collective is under way.

        Args:
            where: Where this rank is, such as "epoch 3 ends".

        Raises:
            Exception: That of the rank which failed.
        """
        self._ask(where, lambda trial: None)

    def fail(self, error: Exception) -> Exception:
        """End the trial on all ranks by this rank's exception.

        Args:
            error: What the objective has raised on this rank.

        Returns:
            What this rank is to raise.
        """
        if self.ended is None:
            failure = Failure.of(error, self._rounds.rank, self._catch)
            self._read(self._rounds.meet(RoundMessage("failed", failure=failure)), error)
        return self.ended or error

    def finish(self, value: _Value) -> list[_Value]:
        """End the trial with what the objective has returned.

        Args:
            value: What it returned on this rank.

        Returns:
            What it returned on each rank.
        """
        if self.ended is not None:  # the objective has swallowed it
            raise self.ended
        messages = self._meet(RoundMessage("the end of the objective", value))
        return [message.value for message in messages]  # type: ignore[misc]

    def _ask(self, at: str, answer: Callable[[optuna.Trial], _Value]) -> _Value:
        """Return rank 0's answer on every rank, or raise what it raised."""
        if self.ended is not None:
            raise self.ended
        value: _Value | None = None
        raised: Exception | None = None
        if self._trial is not None:
            try:
                value = answer(self._trial)
            except Exception as error:
                raised = error
        refused = None if raised is None else Failure.of(raised, self._rounds.rank)
        first = self._meet(RoundMessage(at, value, refused))[0]
        if first.refused is not None:
            raise raised or first.refused.error()
        return first.value  # type: ignore[return-value]

    def _meet(self, message: RoundMessage) -> list[RoundMessage]:
        messages = self._rounds.meet(message)
        self._read(messages, None)
        if self.ended is not None:
            raise self.ended
        return messages

    def _read(self, messages: Sequence[RoundMessage], mine: Exception | None) -> None:
        """End the trial here when a rank has failed, or when they are not at the same place."""
        failures = [message.failure for message in messages if message.failure is not None]
        if failures:
            self.root, self.ended = agreed(failures, mine)
            return
        places = [message.at for message in messages]
        other = next((rank for rank, at in enumerate(places) if at != places[0]), None)
        if other is None:
            return
        told = (
            f"ranks disagree on what trial {self.number} does next: rank 0 is at {places[0]}, "
            f"rank {other} at {places[other]}; call suggest_* and should_prune on every rank, "
            "in the same order, and nothing of a trial inside `if strategy.is_chief:` but "
            "report and set_user_attr"
        )
        self.ended = DisagreementError(at_rank(self._rounds.rank, told))
        self.root = Failure.of(self.ended, 0, self._catch)


class PruningCallback(keras.callbacks.Callback):
    """Report a metric to the trial after every epoch, and end the trial when it is to be pruned.

    All ranks prune at the same epoch: logs are equal on them, and rank 0's pruner decides. Give it
    to `fit` after callbacks that change the logs.

    Args:
        trial: What the objective was given; `optuna.Trial` in plain Optuna works, too.
        monitor: Name of the metric in the logs.

    Raises:
        optuna.TrialPruned: From `fit`, on all ranks.

    Example:
        >>> import optuna
        >>> study = optuna.create_study(direction="maximize")
        >>> callback = PruningCallback(study.ask(), monitor="val_accuracy")
        >>> callback.on_epoch_end(0, {"val_accuracy": 0.9})
    """

    def __init__(self, trial: DistributedTrial | optuna.Trial, monitor: str = "val_loss"):
        super().__init__()
        self.trial = trial
        self.monitor = monitor

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Report the epoch's value, and ask whether to prune."""
        value = (logs or {}).get(self.monitor)
        if value is None:
            raise ValueError(
                f"PruningCallback(monitor={self.monitor!r}): the logs of epoch {epoch + 1} have "
                f"{', '.join(sorted(logs or {})) or 'nothing'}; give validation_data to fit for "
                "val_*, or another monitor"
            )
        self.trial.report(float(value), epoch)
        if self.trial.should_prune():
            raise optuna.TrialPruned(
                f"Trial was pruned after epoch {epoch + 1}, with {self.monitor} {float(value):.4g}"
            )

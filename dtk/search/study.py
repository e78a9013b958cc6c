"""The loop of a study: every rank runs every trial."""

from __future__ import annotations

import dataclasses
import datetime
import random
import socket
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import keras
import numpy as np
import optuna
from optuna.distributions import BaseDistribution

from dtk.cluster import process_owner
from dtk.errors import at_rank
from dtk.search.distributed_trial import SUGGEST, DistributedTrial, Start
from dtk.search.rounds import CaughtRankError, Failure, RoundMessage, Rounds
from dtk.strategies.dtk_strategy import DtkStrategy

Values: TypeAlias = "float | Sequence[float] | None"
Objective: TypeAlias = Callable[[DistributedTrial], Values]
Callback: TypeAlias = "Callable[[optuna.Study, optuna.trial.FrozenTrial], None]"

_NEXT = "the next trial"
# Of objectives that return the same number on all ranks, by relative difference.
_SAME = 1e-6


class _OneTooMany(Exception):
    """A trial that another job has taken first."""


def optimize(
    study: optuna.Study | None,
    objective: Objective,
    n_trials: int | None = None,
    timeout: float | None = None,
    *,
    strategy: DtkStrategy,
    catch: Iterable[type[Exception]] | type[Exception] = (),
    callbacks: Iterable[Callback] = (),
    seed: int | None = None,
    clear_session: bool = True,
    patience: float = 60.0,
) -> optuna.Study:
    """Run the trials of a study, each over all ranks of a strategy. Every rank calls it.

    As `optuna.Study.optimize`, whose sampler, pruner and storage run on rank 0 and are asked there;
    with one process it finds the same trials as plain Optuna does, and so does it with several.
    A trial that is pruned or fails on any rank ends on all of them.

    Before each trial `keras.utils.set_random_seed` is called on every rank with the same number.
    The objective builds and compiles its model inside `strategy.scope()`.

    Args:
        study: Rank 0's; what other ranks give is not used, and may be None.
        objective: Called on every rank with a `DistributedTrial`; returns the number to minimize or
            maximize, of which rank 0's counts, or several of them.
        n_trials: Trials of the study in all, those of earlier runs and other jobs included; None
            for no limit. What a killed job has left unfinished does not count.
        timeout: Seconds after which no further trial begins; None for no limit.
        strategy: Whose ranks run the trials.
        catch: Exceptions after which the study goes on with the next trial.
        callbacks: Called on rank 0 after each trial with the study and the trial.
        seed: The random seed of trial i is `seed + i`, however often the study is resumed; None
            draws it from Python's `random` on rank 0.
        clear_session: Whether to call `keras.utils.clear_session` after each trial, which frees its
            graphs; False for objectives that keep models.
        patience: Seconds that a rank waits for the others when it has left the objective by an
            exception; then it ends the job, since they may wait in a step that it has left.

    Returns:
        On rank 0 `study`, on others a copy of it in memory: `best_params` and all else that reads
        it works on every rank.

    Raises:
        ValueError: Rank 0 has no study, or numbers are out of range.
        Exception: What the objective has raised on any rank, on all of them, unless in `catch`.

    Source:
        ChainerMN's `ChainerMNStudy` (Optuna, `optuna.integration`), where rank 0 owns the study.

    Example:
        >>> import dtk, optuna
        >>> optuna.logging.set_verbosity(optuna.logging.WARNING)
        >>> strategy = dtk.strategies.AllReduceStrategy("local")
        >>> study = optuna.create_study(sampler=optuna.samplers.GridSampler({"x": [0, 1, 2]}))
        >>> objective = lambda trial: (trial.suggest_int("x", 0, 2) - 1) ** 2
        >>> dtk.search.optimize(study, objective, n_trials=3, strategy=strategy).best_params
        {'x': 1}
    """
    if n_trials is not None and n_trials < 0:
        raise ValueError(f"n_trials must be at least 0, or None for no limit, got {n_trials}")
    if patience <= 0:
        raise ValueError(f"patience must be more than 0 seconds, got {patience}")
    caught = (catch,) if isinstance(catch, type) else tuple(catch)
    more = (n_trials, timeout, tuple(callbacks))
    run = _Run(objective, strategy, caught, seed, clear_session, patience, *more)
    return run.lead(study) if strategy.is_chief else run.follow()


@dataclasses.dataclass
class _Run:
    """One call of `optimize` on one rank."""

    _objective: Objective
    _strategy: DtkStrategy
    _catch: tuple[type[Exception], ...]
    _seed: int | None
    _clear_session: bool
    _patience: float
    _n_trials: int | None
    _timeout: float | None
    _callbacks: tuple[Callback, ...]
    _told: Exception | None = None  # what all ranks raise already
    _broken: Exception | None = None

    def __post_init__(self) -> None:
        self._rounds = Rounds(self._strategy.communicator, self._patience)

    def lead(self, study: optuna.Study | None) -> optuna.Study:
        """Run the study on rank 0, and tell the others of each trial."""
        try:
            if study is None:
                raise ValueError(
                    at_rank(0, "study=None; rank 0 owns the study: give it optuna.create_study()")
                )
            self._optimize(study)
            results = Results.of(study, random.getrandbits(31))
        except Exception as error:
            if error is not self._told:  # the storage's, or a callback's
                self._rounds.meet(RoundMessage(_NEXT, failure=Failure.of(error, 0)))
            raise
        self._rounds.meet(RoundMessage(_NEXT, results))
        # An exception may have left ranks at different places of their random numbers.
        keras.utils.set_random_seed(results.seed)
        return study

    def _is_done(self, study: optuna.Study, before: int | None = None) -> bool:
        return self._n_trials is not None and counted(study, before) >= self._n_trials

    def _optimize(self, study: optuna.Study) -> None:
        def stop_when_done(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
            if self._is_done(study):
                study.stop()

        def objective(trial: optuna.Trial) -> Values:
            try:
                return self._lead_one(trial, study)
            except Exception as error:
                if error is not self._told and not isinstance(error, _OneTooMany):
                    # Of the storage, or of ranks that are gone: `catch` is about objectives.
                    self._broken = error
                    study.stop()
                raise

        fail_abandoned(study)
        if self._is_done(study):
            return
        study.optimize(
            objective,
            timeout=self._timeout,
            catch=(*self._catch, CaughtRankError, _OneTooMany),
            callbacks=[*self._callbacks, stop_when_done],
        )
        if self._broken is not None:
            raise self._broken

    def _lead_one(self, trial: optuna.Trial, study: optuna.Study) -> Values:
        notes: dict[str, object] = {"owner": process_owner.this_process()}

        def note(**more: object) -> None:
            trial.set_user_attr(ATTRIBUTE, {**notes, **more})

        def give_up(failure: Failure) -> None:
            note(failure=str(failure))
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL, skip_if_finished=True)

        if self._is_done(study, before=trial.number):
            late = f"another job runs the last of {self._n_trials} trials"
            note(failure=late)
            raise _OneTooMany(late)
        seed = random.getrandbits(31) if self._seed is None else self._seed + trial.number
        notes["seed"] = seed % 2**32
        note()
        start = Start(trial.number, trial.datetime_start, trial.user_attrs, seed % 2**32)
        self._rounds.meet(RoundMessage(_NEXT, start))
        self._rounds.give_up = give_up
        distributed = DistributedTrial(start, trial, self._rounds, self._catch)
        try:
            value = self._run(distributed)
        except Exception as error:
            if error is distributed.ended:
                self._told, root = error, distributed.root
                note(ended=True, **({} if root is None or root.pruned else {"failure": str(root)}))
            raise
        finally:
            self._rounds.give_up = lambda failure: None
        note(ended=True)
        return value

    def follow(self) -> optuna.Study:
        """Run the trials that rank 0 tells of."""
        while True:
            first = self._rounds.meet(RoundMessage(_NEXT))[0]
            if first.failure is not None:
                raise first.failure.error()
            start = first.value
            if isinstance(start, Results):
                keras.utils.set_random_seed(start.seed)
                return start.study()
            assert isinstance(start, Start)
            trial = DistributedTrial(start, None, self._rounds, self._catch)
            try:
                self._run(trial)
            except Exception:
                if trial.root is None or not (trial.root.pruned or trial.root.caught):
                    raise

    def _run(self, trial: DistributedTrial) -> Values:
        """Run the objective; what it raises on any rank is raised on all."""
        # For an exception that has ended a trial earlier on some ranks than on others.
        self._strategy.communicator.resynchronize()
        keras.utils.set_random_seed(trial.seed)
        try:
            with self._strategy.meeting(trial.arrive):
                value = self._objective(trial)
        except Exception as error:
            agreed = trial.fail(error)
            if agreed is error:
                raise
            raise agreed from error
        finally:
            if self._clear_session:
                keras.utils.clear_session()
        values = trial.finish(value)
        if self._strategy.is_chief:
            _compare(values, trial.number)
        return values[0]


def _compare(values: Sequence[Values], number: int) -> None:
    """Warn when ranks have returned different numbers; None on others than rank 0 is fine."""
    others = {rank: v for rank, v in enumerate(values) if v is not None}
    for rank in [rank for rank, v in others.items() if not _is_close(v, values[0])][:1]:
        message = (
            f"the objective of trial {number} returned {values[0]} here and {values[rank]} on rank "
            f"{rank}; rank 0's counts. Return what is equal on all ranks, such as a number of "
            "model.evaluate"
        )
        warnings.warn(at_rank(0, message), stacklevel=2)


def _is_close(value: Values, other: Values) -> bool:
    try:
        one, two = np.asarray(value, float), np.asarray(other, float)
        return bool(np.allclose(one, two, rtol=_SAME, atol=0, equal_nan=True))
    except (TypeError, ValueError):  # no numbers, which Optuna has a word for, or not as many
        return value == other


_KINDS = {kind.__name__: kind for kind in SUGGEST}


class Distribution(NamedTuple):
    """A distribution of a parameter as plain data; Optuna's JSON has no tuples for choices."""

    kind: str  # name of its class
    settings: Mapping[str, object]  # what it is made of

    @classmethod
    def of(cls, distribution: BaseDistribution) -> Distribution:
        kind = next(name for name, one in _KINDS.items() if isinstance(distribution, one))
        return cls(kind, dict(vars(distribution)))

    def made(self) -> BaseDistribution:
        return _KINDS[self.kind](**self.settings)


@dataclasses.dataclass(frozen=True)
class Results:
    """A study that is over, as plain data that rank 0 sends to the others."""

    seed: int  # what all ranks go on with
    name: str  # the study's
    directions: Sequence[int]  # of each of its values, as numbers
    trials: Sequence[Mapping[str, object]]  # the fields of each trial

    @classmethod
    def of(cls, study: optuna.Study, seed: int) -> Results:
        trials = [
            {
                **{name.removeprefix("_"): value for name, value in vars(trial).items()},
                "state": int(trial.state),
                "distributions": {n: Distribution.of(d) for n, d in trial.distributions.items()},
            }
            for trial in study.trials
        ]
        return cls(seed, study.study_name, [int(one) for one in study.directions], trials)

    def study(self) -> optuna.Study:
        """Make a study in memory, without a word in the log."""
        storage = optuna.storages.InMemoryStorage()
        directions = [optuna.study.StudyDirection(number) for number in self.directions]
        storage.create_new_study(directions, self.name)
        made = optuna.load_study(study_name=self.name, storage=storage)
        for fields in self.trials:
            space: Mapping[str, Distribution] = fields["distributions"]  # type: ignore[assignment]
            changed = {
                "value": None,  # `values` holds it
                "state": optuna.trial.TrialState(fields["state"]),
                "distributions": {name: one.made() for name, one in space.items()},
            }
            made.add_trial(optuna.trial.FrozenTrial(**{**fields, **changed}))
        return made


# A trial has one user attribute of dtk's, `dtk`: the process that runs it, the seed, and once its
# objective has returned or raised, `ended`, with the reason of a failure. A process that is killed
# cannot say that its trial is over; the next one that uses the study does, where it can see that
# the other is gone.
ATTRIBUTE = "dtk"
# Until a process has noted that it runs a trial which it has begun, storages of databases included.
_TO_NOTE = datetime.timedelta(minutes=1)
_RUNNING = optuna.trial.TrialState.RUNNING


def counts(trial: optuna.trial.FrozenTrial) -> bool:
    """Return whether a trial is one of `n_trials`.

    Those that ended with their job, such as by a signal, are not: they will be made up for. Nor is
    one too many, of jobs that began their last at once.
    """
    if trial.state == _RUNNING:
        return True
    notes = trial.user_attrs.get(ATTRIBUTE, {})
    return trial.state.is_finished() and ("ended" in notes or "owner" not in notes)


def counted(study: optuna.Study, before: int | None = None) -> int:
    """Count the trials of a study that have ended or are running."""
    trials = study.get_trials(deepcopy=False)
    return sum(counts(t) for t in trials if before is None or t.number < before)


def _place(process: object) -> str:
    """Say where a trial may be running, of which nothing is seen from here."""
    if not isinstance(process, Mapping):
        return "without dtk, in a process that is not known"
    name = process_owner.host_of(process)
    if name == socket.gethostname():
        return "on this host, but in another container or before it was last started"
    return f"on another host, {name}"


def fail_abandoned(study: optuna.Study) -> None:
    """Mark running trials failed whose process is gone, so that others are run in their place."""
    failed: list[int] = []
    unknown: dict[str, list[int]] = {}
    for trial in study.get_trials(deepcopy=False, states=(_RUNNING,)):
        process = trial.user_attrs.get(ATTRIBUTE, {}).get("owner")
        gone = process_owner.is_gone(process) if isinstance(process, Mapping) else None
        if gone:
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL, skip_if_finished=True)
            failed.append(trial.number)
        elif gone is None and (
            ATTRIBUTE in trial.user_attrs
            or trial.datetime_start is None
            # else another job may have just begun it, and not yet noted that it runs it
            or datetime.datetime.now() - trial.datetime_start >= _TO_NOTE
        ):
            unknown.setdefault(_place(process), []).append(trial.number)
    if failed:
        print(f"dtk: trials {failed} were left by a job that has ended; marked as failed")
    for place, numbers in unknown.items():
        warnings.warn(
            f"trials {numbers} of study {study.study_name!r} are running {place}, or were "
            "left there by a job that has ended; they count until study.tell(number, "
            "state=optuna.trial.TrialState.FAIL) says so. RDBStorage(url, heartbeat_interval=60) "
            "lets Optuna notice",
            stacklevel=3,
        )

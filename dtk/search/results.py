"""Trials and distributions of Optuna's as plain data: what rank 0 tells the others of its study."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

_KINDS = {
    kind.__name__: kind for kind in (CategoricalDistribution, FloatDistribution, IntDistribution)
}


class Distribution(NamedTuple):
    """A distribution of a parameter."""

    kind: str  # name of its class
    settings: Mapping[str, object]  # what it is made of

    @classmethod
    def of(cls, distribution: BaseDistribution) -> Distribution:
        """Describe a distribution."""
        kind = next(name for name, one in _KINDS.items() if isinstance(distribution, one))
        return cls(kind, dict(vars(distribution)))

    def made(self) -> BaseDistribution:
        """Make Optuna's again."""
        return _KINDS[self.kind](**self.settings)


@dataclasses.dataclass(frozen=True)
class Results:
    """A study that is over."""

    seed: int  # what all ranks go on with
    name: str  # the study's
    directions: Sequence[int]  # of each of its values, as numbers
    trials: Sequence[Mapping[str, object]]  # the fields of each trial

    @classmethod
    def of(cls, study: optuna.Study, seed: int) -> Results:
        """Describe a study."""
        directions = [int(direction) for direction in study.directions]
        return cls(seed, study.study_name, directions, [_fields(one) for one in study.trials])

    def study(self) -> optuna.Study:
        """Make a study in memory, without a word in the log."""
        storage = optuna.storages.InMemoryStorage()
        directions = [optuna.study.StudyDirection(number) for number in self.directions]
        storage.create_new_study(directions, self.name)
        made = optuna.load_study(study_name=self.name, storage=storage)
        made.add_trials([_trial(fields) for fields in self.trials])
        return made


def _fields(trial: optuna.trial.FrozenTrial) -> dict[str, object]:
    fields = {name.removeprefix("_"): value for name, value in vars(trial).items()}
    distributions = {name: Distribution.of(one) for name, one in trial.distributions.items()}
    return {**fields, "state": int(trial.state), "distributions": distributions}


def _trial(fields: Mapping[str, object]) -> optuna.trial.FrozenTrial:
    distributions: Mapping[str, Distribution] = fields["distributions"]  # type: ignore[assignment]
    changed = {
        "state": optuna.trial.TrialState(fields["state"]),
        "distributions": {name: one.made() for name, one in distributions.items()},
    }
    return optuna.trial.FrozenTrial(value=None, **{**fields, **changed})

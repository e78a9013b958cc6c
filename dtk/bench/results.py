"""BenchResults of a benchmark, and a file of them. No TensorFlow here."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

from dtk.bench.setting import BenchError
from dtk.bench.worker import RankHost

_FORMAT = 3


@dataclasses.dataclass(frozen=True)
class Reading:
    """Numbers that one rank read in one measurement."""

    seconds: float  # of a step; mean of the measurement's
    # bytes handed to the transport per step, see `Communicator.bytes_sent`; None where they are not
    # counted
    sent: float | None
    # part of these steps' time in which a collective was under way, waiting for slower ranks
    # included; None where it is not known
    communicating: float | None
    # seconds of the whole measurement: also its first step, and what goes before and after
    fit: float
    steps: tuple[float, ...] = ()  # seconds of each step, from the end of the one before


class Measured(TypedDict, total=False):
    """What was measured: fields of `Setting`, and who took part."""

    exchanges: Sequence[str]
    batch_size: int
    steps: int
    rounds: int
    communicators: Sequence[str]  # a job of dtk's for each
    tuned: Sequence[str]  # settings of a second job for each, and of a second limit; "NAME=VALUE"
    workers: int  # how many there were in each
    ranks: Sequence[RankHost]  # where they ran
    versions: Mapping[str, str]  # of the libraries that were measured, by name


@dataclasses.dataclass
class BenchResults:
    """All measurements of a benchmark, and where they were taken.

    Field names are the keys of the saved file.

    Example:
        >>> BenchResults(parameters={"mlp": 10512394}).absent
        {}
    """

    # what was measured, by whom, on what, with which versions
    setting: Measured = dataclasses.field(default_factory=Measured)
    # by task, of its model; 0 without one
    parameters: dict[str, int] = dataclasses.field(default_factory=dict)
    # by task and variant, in the order measured: measurements, of a reading per rank each
    turns: dict[str, dict[str, list[list[Reading]]]] = dataclasses.field(default_factory=dict)
    # by job or variant, why it was not measured
    absent: dict[str, str] = dataclasses.field(default_factory=dict)

    def ended_early(self, tasks: Sequence[str], why: str) -> BenchResults:
        """Return the rounds that all variants of a task have taken, and what is missing by name.

        Example:
            >>> turn = [Reading(0.02, 0.0, 0.0, 1.0)]
            >>> taken = {"limit": [turn, turn], "none": [turn]}
            >>> begun = BenchResults({"rounds": 5}, turns={"mlp": taken})
            >>> begun.ended_early(["mlp", "resnet20"], "SIGINT").absent
            {'mlp': '1 of 5 rounds: SIGINT', 'resnet20': 'SIGINT'}
        """
        turns, absent, planned = {}, dict(self.absent), self.setting["rounds"]
        for task in tasks:
            variants = self.turns.get(task, {})
            rounds = min(map(len, variants.values()), default=0)
            if rounds:
                turns[task] = {name: taken[:rounds] for name, taken in variants.items()}
            if rounds < planned:
                absent[task] = f"{rounds} of {planned} rounds: {why}" if rounds else why
        return dataclasses.replace(self, turns=turns, absent=absent)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything to a file, as JSON."""
        found = {"dtk bench": _FORMAT, **dataclasses.asdict(self)}
        Path(path).write_text(json.dumps(found, indent=1) + "\n")


def read(path: str | os.PathLike[str]) -> BenchResults:
    """Read what `BenchResults.save` wrote."""
    try:
        found = json.loads(Path(path).read_text())
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):  # not JSON, or nested without end
        found = None
    saved = found.pop("dtk bench", None) if isinstance(found, dict) else None
    if saved in range(1, _FORMAT):
        raise BenchError(f"{path} was saved by an older dtk; measure anew with `dtk bench --json`")
    if saved != _FORMAT:
        raise BenchError(
            f"{path} is not a saved benchmark; expected what `dtk bench --json FILE` writes"
        )
    try:
        for variants in found["turns"].values():
            for turns in variants.values():
                for turn in turns:
                    turn[:] = [Reading(**{**one, "steps": tuple(one["steps"])}) for one in turn]
        return BenchResults(**found)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BenchError(
            f"{path} is damaged ({type(error).__name__}: {error}); measure anew with "
            "`dtk bench --json`"
        ) from None


def in_step(turn: Sequence[Reading]) -> float:
    """Return the seconds of a step if each began when the slowest rank had ended the last.

    An estimate: what slows both down at the same moment did not fall on the same step of both.

    Example:
        >>> in_step([Reading(2.0, 0, 0, 9.0, (1.0, 3.0)), Reading(2.0, 0, 0, 9.0, (3.0, 1.0))])
        3.0
    """
    slowest = statistics.mean(map(max, zip(*(reading.steps for reading in turn), strict=True)))
    own = statistics.mean(statistics.mean(reading.steps) for reading in turn)
    # Not the steps themselves: the first of them holds what stands before it, once an epoch.
    return slowest / own * statistics.mean(reading.seconds for reading in turn)


def apart(ranks: Sequence[RankHost]) -> bool:
    """Return whether each rank has cores of its own.

    Where they share them, one that waits lets the slowest go on faster.

    Example:
        >>> apart([{"host": "a", "cores": [0]}, {"host": "a", "cores": [0]}])
        False
    """
    used = [(rank["host"], core) for rank in ranks for core in rank["cores"]]
    return len(set(used)) == len(used)

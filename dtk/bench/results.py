"""What a benchmark measures, and its results: a file of them. No TensorFlow here."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypedDict

from dtk.bench.worker import RankHost
from dtk.errors import DtkError

MODELS = ("resnet20", "mlp", "embedding", "transformer")
_DENSE = ("none", "fp16", "bf16")  # which shard_optimizer goes with
# The short names of dtk.exchange, which imports TensorFlow, and "none" for whole gradients.
EXCHANGES = (*_DENSE, *(f"{bits}bit" for bits in range(1, 17)))
BLOCK = "block:ROWS"  # block momentum, with so many rows of all workers in a block
# Bytes of two all-reduces that tell what a message takes from what a byte does: see `dtk plan`.
# Both go round a ring; `dtk.communicators.collective` adds fewer up in one hop.
TELLING = (1 << 17, 4 << 20)
_ALLREDUCE = "allreduce"
_FORMAT = 3


class BenchError(DtkError, ValueError):
    """A benchmark that cannot be run or compared as asked."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """Models, exchanges and sizes to measure, and how often.

    Example:
        >>> Setting(models=("mlp",), rounds=3).rounds
        3
    """

    models: tuple[str, ...] = MODELS  # some of MODELS, to be trained
    # some of EXCHANGES, or BLOCK with a number
    exchanges: tuple[str, ...] = ("none", "fp16", "1bit")
    batch_size: int = 32  # rows of a step, per worker
    # steps of a measurement that count, see also `steps_with`; one more goes before them
    steps: int = 20
    # how often each variant is measured; once more, in which it is traced, goes before
    rounds: int = 5
    allreduce: tuple[int, ...] = ()  # sizes of tensors, in bytes, to be summed
    # whether models train with Adam, and dtk also with a part of its slots on each worker
    shard_optimizer: bool = False

    def __post_init__(self) -> None:
        check_names("--model", self.models, MODELS)
        named = tuple(name for name in self.exchanges if not block_of(name))
        check_names("--exchange", named, EXCHANGES, BLOCK)
        for size in self.allreduce:
            if size < 4 or size % 4:
                raise BenchError(
                    f"--allreduce {size}: expected bytes of whole float32 numbers, such as 4kB"
                )

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks, one after the other: models, then sizes of all-reduces.

        Example:
            >>> Setting(models=("mlp",), allreduce=(4000,)).tasks
            ('mlp', 'allreduce 4000')
        """
        return (*self.models, *map(task_of, self.allreduce))

    @property
    def sharded(self) -> tuple[str, ...]:
        """The exchanges that are measured with a sharded optimizer, too.

        Example:
            >>> Setting(exchanges=("none", "1bit"), shard_optimizer=True).sharded
            ('none',)
        """
        return tuple(e for e in self.exchanges if self.shard_optimizer and e in _DENSE)

    def steps_with(self, exchange: str, workers: int) -> int:
        """Return the steps of a measurement with an exchange.

        A block communicates in its last step alone, so that a measurement is of whole blocks: of as
        few as have `steps` steps.

        Example:
            >>> setting = Setting(batch_size=32, steps=20)
            >>> setting.steps_with("1bit", workers=2), setting.steps_with("block:512", workers=2)
            (20, 24)
        """
        rows = block_of(exchange)
        if not rows:
            return self.steps
        if rows < workers:
            raise BenchError(
                f"--exchange {exchange} has less than a row for each of {workers} workers; a block "
                f"counts the rows of all, use e.g. block:{8 * self.batch_size * workers}"
            )
        # As `BlockMomentum` does: a block is closed by the step that fills it.
        block = math.ceil(rows // workers / self.batch_size)
        return math.ceil(self.steps / block) * block


def parse_size(text: str) -> int:
    """Read bytes, from a number with a unit or without.

    Example:
        >>> parse_size("4kB"), parse_size("1.5 MB"), parse_size("4096")
        (4000, 1500000, 4096)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([kMG]?)B?", text.strip())
    if match is None:
        raise BenchError(f"--allreduce {text}: expected a size, such as 4kB or 100MB")
    return round(float(match[1]) * {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}[match[2]])


def task_of(size: int) -> str:
    """Return the name of the task of summing a tensor.

    Example:
        >>> task_of(4000)
        'allreduce 4000'
    """
    return f"{_ALLREDUCE} {size}"


def bytes_of(task: str) -> int:
    """Return the bytes of the tensor that a task sums; 0 where it trains a model.

    Example:
        >>> bytes_of("allreduce 4000"), bytes_of("mlp")
        (4000, 0)
    """
    kind, _, size = task.partition(" ")
    return int(size) if kind == _ALLREDUCE else 0


def block_of(exchange: str) -> int:
    """Return the rows of a block of block momentum; 0 of what sends gradients.

    Example:
        >>> block_of("block:512"), block_of("1bit")
        (512, 0)
    """
    match = re.fullmatch(r"block:([1-9][0-9]*)", exchange)
    return int(match[1]) if match else 0


def check_names(option: str, names: Iterable[str], known: Iterable[str], *more: str) -> None:
    """Refuse a name that is unknown.

    Example:
        >>> check_names("--model", ["vgg"], ["mlp", "resnet20"])
        Traceback (most recent call last):
        dtk.bench.results.BenchError: --model vgg: unknown, expected mlp or resnet20
    """
    for name in names:
        if name not in known:
            *others, last = (*known, *more)
            raise BenchError(f"{option} {name}: unknown, expected {', '.join(others)} or {last}")


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
        turns, absent = {}, dict(self.absent)
        planned = self.setting.get("rounds", 0)  # nothing, before all jobs have started
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
        fields = {"dtk bench": _FORMAT, **dataclasses.asdict(self)}
        Path(path).write_text(json.dumps(fields, indent=1) + "\n")


def read(path: str | os.PathLike[str]) -> BenchResults:
    """Read what `BenchResults.save` wrote."""
    try:
        fields = json.loads(Path(path).read_text())
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):  # not JSON, or nested without end
        fields = None
    saved = fields.pop("dtk bench", None) if isinstance(fields, dict) else None
    if saved in range(1, _FORMAT):
        raise BenchError(f"{path} was saved by an older dtk; measure anew with `dtk bench --json`")
    if saved != _FORMAT:
        raise BenchError(
            f"{path} is not a saved benchmark; expected what `dtk bench --json FILE` writes"
        )
    try:
        for variants in fields["turns"].values():
            for turns in variants.values():
                for turn in turns:
                    turn[:] = [Reading(**{**one, "steps": tuple(one["steps"])}) for one in turn]
        return BenchResults(**fields)
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

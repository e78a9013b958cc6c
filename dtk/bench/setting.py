"""The setting of a benchmark. No TensorFlow here."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable

from dtk.errors import DtkError

MODELS = ("resnet20", "mlp", "embedding", "transformer")
# The short names of dtk.exchange, which imports TensorFlow, and "none" for whole gradients.
EXCHANGES = ("none", "fp16", "bf16", *(f"{bits}bit" for bits in range(1, 17)))
BLOCK = "block:ROWS"  # block momentum, with so many rows of all workers in a block
# Bytes of two all-reduces that tell what a message takes from what a byte does: see `dtk plan`.
# Both go round a ring; `dtk.communicators.collective` adds fewer up in one hop.
TELLING = (1 << 17, 4 << 20)
_ALLREDUCE = "allreduce"


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
        for name in ("batch_size", "steps", "rounds"):
            value = getattr(self, name)
            if value < 1:
                option = name.replace("_", "-")
                raise BenchError(f"--{option} {value}: expected 1 or more")

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
        return tuple(e for e in self.exchanges if self.shard_optimizer and e in EXCHANGES[:3])

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
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([kMG]?)B?", text.strip())
    if found is None:
        raise BenchError(f"--allreduce {text}: expected a size, such as 4kB or 100MB")
    return round(float(found[1]) * {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}[found[2]])


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
    found = re.fullmatch(r"block:([1-9][0-9]*)", exchange)
    return int(found[1]) if found else 0


def check_names(option: str, given: Iterable[str], known: Iterable[str], *more: str) -> None:
    """Refuse a name that is unknown.

    Example:
        >>> check_names("--model", ["vgg"], ["mlp", "resnet20"])
        Traceback (most recent call last):
        dtk.bench.setting.BenchError: --model vgg: unknown, expected mlp or resnet20
    """
    for name in given:
        if name not in known:
            *others, last = (*known, *more)
            expected = f"{', '.join(others)} or {last}"
            raise BenchError(f"{option} {name}: unknown, expected {expected}")

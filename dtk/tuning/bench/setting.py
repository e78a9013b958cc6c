"""What a benchmark is asked to measure. No TensorFlow here."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from dtk.errors import DtkError

MODELS = ("resnet20", "mlp", "embedding", "transformer")
# The short names of dtk.exchange, which imports TensorFlow, and "none" for whole gradients.
EXCHANGES = ("none", "fp16", "bf16", "1bit", "2bit", "4bit", "8bit", "16bit")
# Bytes of two all-reduces that tell what a message takes from what a byte does: see `dtk plan`.
# Both go round a ring; `dtk.communicators.collective` adds fewer up in one hop.
TELLING = (1 << 17, 4 << 20)
_ALLREDUCE = "allreduce"


class BenchError(DtkError, ValueError):
    """A benchmark that cannot be run or compared as asked."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """What to measure.

    Attributes:
        models: Some of MODELS, to be trained.
        exchanges: Some of EXCHANGES.
        batch_size: Rows of a step, per worker.
        steps: Steps of a turn that are measured; one more goes before them.
        rounds: Turns that each contender takes; one more, in which it is traced, goes before them.
        allreduce: Sizes of tensors, in bytes, to be summed.

    Raises:
        BenchError: Another name, or a number below 1.

    Example:
        >>> Setting(models=("mlp",), rounds=3).rounds
        3
    """

    models: tuple[str, ...] = MODELS
    exchanges: tuple[str, ...] = ("none", "fp16", "1bit")
    batch_size: int = 32
    steps: int = 20
    rounds: int = 5
    allreduce: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_names("--model", self.models, MODELS)
        _check_names("--exchange", self.exchanges, EXCHANGES)
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
        """What is measured, one after the other: models, then sizes.

        Example:
            >>> Setting(models=("mlp",), allreduce=(4000,)).tasks
            ('mlp', 'allreduce 4000')
        """
        return (*self.models, *map(task_of, self.allreduce))

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Setting:
        """From what `dataclasses.asdict` made, also after JSON.

        Example:
            >>> Setting.of({"models": ["mlp"]}).models
            ('mlp',)
        """
        values: dict[str, Any] = dict(fields)
        for name, value in values.items():
            values[name] = tuple(value) if isinstance(value, list) else value
        return cls(**values)


def parse_size(text: str) -> int:
    """Bytes, from a number with a unit or without.

    Raises:
        BenchError: It is something else.

    Example:
        >>> parse_size("4kB"), parse_size("1.5 MB"), parse_size("4096")
        (4000, 1500000, 4096)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([kMG]?)B?", text.strip())
    if found is None:
        raise BenchError(f"--allreduce {text}: expected a size, such as 4kB or 100MB")
    return round(float(found[1]) * {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}[found[2]])


def task_of(size: int) -> str:
    """The task of summing a tensor of so many bytes.

    Example:
        >>> task_of(4000)
        'allreduce 4000'
    """
    return f"{_ALLREDUCE} {size}"


def bytes_of(task: str) -> int:
    """The size a task sums; 0 where it trains a model.

    Example:
        >>> bytes_of("allreduce 4000"), bytes_of("mlp")
        (4000, 0)
    """
    kind, _, size = task.partition(" ")
    return int(size) if kind == _ALLREDUCE else 0


def _check_names(option: str, given: tuple[str, ...], known: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            expected = f"{', '.join(known[:-1])} or {known[-1]}"
            raise BenchError(f"{option} {name}: unknown, expected {expected}")

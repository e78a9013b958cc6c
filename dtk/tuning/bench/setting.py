"""What a benchmark is asked to measure. No TensorFlow here."""

from __future__ import annotations

import dataclasses
import json

from dtk.errors import DtkError

MODELS = ("resnet20", "mlp", "embedding", "transformer")
# The short names of dtk.exchange, which imports TensorFlow, and "none" for whole gradients.
EXCHANGES = ("none", "fp16", "bf16", "1bit", "2bit", "4bit", "8bit", "16bit")


class BenchError(DtkError, ValueError):
    """A benchmark that cannot be run or compared as asked."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """What to measure.

    Attributes:
        models: Some of MODELS.
        exchanges: Some of EXCHANGES.
        batch_size: Rows of a step, per worker.
        steps: Steps of a turn that are measured; one more goes before them.
        rounds: Turns that each contender takes; one more, in which it is traced, goes before them.

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

    def __post_init__(self) -> None:
        _check_names("--model", self.models, MODELS)
        _check_names("--exchange", self.exchanges, EXCHANGES)
        for name in ("batch_size", "steps", "rounds"):
            value = getattr(self, name)
            if value < 1:
                option = name.replace("_", "-")
                raise BenchError(f"--{option} {value}: expected 1 or more")

    def dumps(self) -> str:
        """As one argument of a command.

        Example:
            >>> Setting.loads(Setting(steps=3).dumps()) == Setting(steps=3)
            True
        """
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def loads(cls, text: str) -> Setting:
        """From what `dumps` returned."""
        values = json.loads(text)
        values["models"], values["exchanges"] = map(tuple, (values["models"], values["exchanges"]))
        return cls(**values)


def _check_names(option: str, given: tuple[str, ...], known: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            expected = f"{', '.join(known[:-1])} or {known[-1]}"
            raise BenchError(f"{option} {name}: unknown, expected {expected}")

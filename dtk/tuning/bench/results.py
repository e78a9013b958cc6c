"""What was measured: lines from rank 0, then a file. No TensorFlow here."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtk.tuning.bench.setting import BenchError

# In front of what rank 0 prints for the command line, apart from what libraries print.
_MARK = "dtk bench: "
_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Reading:
    """What one rank read in one turn.

    Attributes:
        seconds: Of a step; mean of the turn's.
        sent: Bytes handed to the transport per step, see `Communicator.bytes_sent`.
        communicating: Part of these steps' time in which a collective was under way, waiting for
            slower ranks included.
        fit: Seconds of the whole turn: also its first step, and what goes before and after.
    """

    seconds: float
    sent: float
    communicating: float
    fit: float


@dataclasses.dataclass
class Results:
    """All samples of a benchmark, and where they were taken.

    Attributes:
        setting: What was measured, on what, with which versions; see `measure.describe`.
        parameters: Of each model.
        turns: By model and contender, in the order measured: turns, of a reading per rank each.
        allreduces: By bytes, seconds of all-reduces of so many, as rank 0 saw them.

    Example:
        >>> results = Results()
        >>> results.take(line({"model": "mlp", "parameters": 10512394}))
        True
        >>> results.parameters
        {'mlp': 10512394}
    """

    setting: dict[str, Any] = dataclasses.field(default_factory=dict)
    parameters: dict[str, int] = dataclasses.field(default_factory=dict)
    turns: dict[str, dict[str, list[list[Reading]]]] = dataclasses.field(default_factory=dict)
    allreduces: dict[int, list[float]] = dataclasses.field(default_factory=dict)

    def take(self, printed: str) -> bool:
        """Take in one line of rank 0's output.

        Args:
            printed: It may have the rank in front.

        Returns:
            Whether it was one of `line`.
        """
        _, mark, text = printed.partition(_MARK)
        if not mark:
            return False
        record = json.loads(text)
        if "setting" in record:
            self.setting = record["setting"]
        elif "allreduce" in record:
            self.allreduces[record["allreduce"]] = record["seconds"]
        elif "parameters" in record:
            self.parameters[record["model"]] = record["parameters"]
            self.turns[record["model"]] = {}
        else:
            turns = self.turns[record["model"]].setdefault(record["contender"], [])
            turns.append([Reading(**reading) for reading in record["turn"]])
        return True

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything to a file, as JSON."""
        found = {"dtk bench": _FORMAT, **dataclasses.asdict(self)}
        Path(path).write_text(json.dumps(found, indent=1) + "\n")


def line(record: Mapping[str, Any]) -> str:
    """One line for `Results.take`.

    Args:
        record: {"setting"}, {"allreduce", "seconds"}, {"model", "parameters"} or {"model",
            "contender", "turn"}.

    Example:
        >>> line({"setting": {}})
        'dtk bench: {"setting": {}}'
    """
    return _MARK + json.dumps(record)


def read(path: str | os.PathLike[str]) -> Results:
    """Read what `Results.save` wrote.

    Raises:
        BenchError: It cannot be read, or is something else.
    """
    try:
        found = json.loads(Path(path).read_text())
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        found = None
    if not isinstance(found, dict) or found.pop("dtk bench", None) != _FORMAT:
        raise BenchError(
            f"{path} is not a saved benchmark; expected what `dtk bench --json FILE` writes"
        )
    for contenders in found["turns"].values():
        for turns in contenders.values():
            turns[:] = [[Reading(**reading) for reading in turn] for turn in turns]
    # JSON's keys are text. Runs saved by earlier versions hold none.
    found["allreduces"] = {int(n): seconds for n, seconds in found.get("allreduces", {}).items()}
    return Results(**found)

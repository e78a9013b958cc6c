"""Exports of models while they train, by the evaluator of a parameter-server job."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import keras

from dtk.inference.artifacts import ENDINGS, Format, export


class LatestExporter:
    """Exports every evaluated model, to `export/<name>/` beside the checkpoints.

    For `dtk.strategies.EvaluatorConfig`. An export is named as its checkpoint.

    Args:
        name: The exporter's folder.
        format: As for `dtk.inference.export`.
        keep: Exports to keep; the oldest are removed.
        verify: As for `dtk.inference.export`.

    Raises:
        ValueError: `keep` is below 1.

    Example:
        >>> LatestExporter(keep=2).name
        'latest'

    Source: `LatestExporter` of TensorFlow's `train_and_evaluate`.
    """

    def __init__(
        self,
        name: str = "latest",
        format: Format = "tf_saved_model",
        *,
        keep: int = 5,
        verify: bool = True,
    ):
        if keep < 1:
            raise ValueError(f"keep={keep!r}; expected 1 export or more")
        self.name, self.format, self.keep, self.verify = name, format, keep, verify

    def __call__(
        self,
        model: keras.Model,
        directory: Path,
        checkpoint: str,
        numbers: Mapping[str, float],
        earlier: Sequence[Mapping[str, float]],
    ) -> Path | None:
        """Export the model of a checkpoint; return where it is."""
        folder = directory / "export" / self.name
        target = folder / f"{checkpoint}{ENDINGS[self.format]}"
        export(model, target, self.format, verify=self.verify)
        for old in sorted(folder.glob("checkpoint-*"))[: -self.keep]:
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        print(f"evaluator: exported {target}", flush=True)
        return target


class BestExporter(LatestExporter):
    """Exports an evaluated model that is better than all before it.

    The numbers before it are those of evaluation.csv, so a restarted job goes on with them. Numbers
    that are not finite do not count, and their models are not exported.

    Args:
        name: The exporter's folder.
        format: As for `dtk.inference.export`.
        monitor: The number that decides, such as "loss" or "accuracy".
        mode: "min" or "max": whether smaller or larger is better.
        keep: Exports to keep; the oldest are removed.
        verify: As for `dtk.inference.export`.

    Raises:
        ValueError: `mode` is another word; or, after the first evaluation, there is no such number.

    Example:
        >>> BestExporter(monitor="accuracy", mode="max").name
        'best'

    Source: `BestExporter` of TensorFlow's `train_and_evaluate`.
    """

    def __init__(
        self,
        name: str = "best",
        format: Format = "tf_saved_model",
        *,
        monitor: str = "loss",
        mode: str = "min",
        keep: int = 5,
        verify: bool = True,
    ):
        super().__init__(name, format, keep=keep, verify=verify)
        if mode not in ("min", "max"):
            raise ValueError(f"mode={mode!r}; expected 'min' or 'max'")
        self.monitor, self.mode = monitor, mode

    def __call__(
        self,
        model: keras.Model,
        directory: Path,
        checkpoint: str,
        numbers: Mapping[str, float],
        earlier: Sequence[Mapping[str, float]],
    ) -> Path | None:
        """Export the model of a checkpoint, if it is the best; return where it is."""
        if self.monitor not in numbers:
            raise ValueError(
                f"BestExporter(monitor={self.monitor!r}): an evaluation gives {', '.join(numbers)}"
            )
        sign = 1 if self.mode == "min" else -1
        # Models that have diverged compare with nothing; a restart reads NaN from the file, too.
        before = [row[self.monitor] for row in earlier if math.isfinite(row[self.monitor])]
        value = numbers[self.monitor]
        if not math.isfinite(value) or any(sign * one <= sign * value for one in before):
            return None
        return super().__call__(model, directory, checkpoint, numbers, earlier)

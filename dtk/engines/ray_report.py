"""The callback that reports to Ray; `dtk.engines.ray` exports it."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from pathlib import Path

import numpy as np
import ray.train

from dtk.callbacks import Checkpoint
from dtk.callbacks.checkpointing.contents import TrainingProgress, on_chief
from dtk.callbacks.checkpointing.directory_lock import DirectoryLock
from dtk.nests import Array, Logs, Tree


class ReportToRay(Checkpoint):
    """Tell Ray each epoch's numbers and checkpoint; after a restart go on from the newest.

    A `dtk.callbacks.Checkpoint` whose directory is Ray's storage: what is saved and resumed is said
    there. Every rank has it. Ray's checkpoint is a directory from which `Checkpoint` resumes, too.
    One `fit` of a training function may have it.

    Args:
        save_freq: "epoch", or a number of steps.
        monitor: A number in the epoch's logs; the best epoch's weights lie beside the checkpoint.
        mode: "min" or "max"; "auto" decides by the name.
        resume: Whether to go on from the newest checkpoint of this run.
        save_every_samples: Samples of all ranks from one checkpoint to the next.
        on_save_error: What to do when a checkpoint cannot be written: "warn" or "raise".

    Example:
        See examples/ray_digits.py.
    """

    def __init__(
        self,
        save_freq: str | int = "epoch",
        monitor: str | None = None,
        mode: str = "auto",
        resume: bool = True,
        save_every_samples: int | None = None,
        on_save_error: str = "warn",
    ):
        # Made on rank 0. Ray copies what is written there, and decides how many are kept.
        self._folder = Path(tempfile.gettempdir(), f"dtk-ray-{secrets.token_hex(8)}")
        super().__init__(
            self._folder / "checkpoints",
            save_freq=save_freq,
            max_to_keep=1,
            monitor=monitor,
            mode=mode,
            resume=resume,
            save_every_samples=save_every_samples,
            on_save_error=on_save_error,
        )
        self._lock = DirectoryLock(self._folder)  # beside the checkpoints, so that it is not copied
        self._reported = False

    def on_train_agreed(self, logs: Logs | None = None) -> None:
        """Fetch Ray's newest checkpoint, and resume."""
        newest = ray.train.get_checkpoint()
        if self.resume and newest is not None and not self._begun:
            on_chief(self.strategy, lambda: newest.to_directory(self.directory))
        super().on_train_agreed(logs)

    def save(self, progress: TrainingProgress) -> Path | None:
        """Save now, and give the checkpoint to Ray; every rank calls it.

        Args:
            progress: How far training is.

        Returns:
            Path of the checkpoint; None where there is none, which is said.
        """
        path = super().save(progress)
        if path is not None:
            self._report(progress.epoch, progress.logs, progress.step)
        return path

    def on_epoch_agreed(self, epoch: int, logs: Logs | None = None) -> None:
        """Report, with a checkpoint if one is due."""
        self._reported = False
        super().on_epoch_agreed(epoch, logs)
        if not self._reported:
            self._report(epoch + 1, logs, saved=False)

    def on_fit_left(self) -> None:
        """Remove what Ray has copied."""
        super().on_fit_left()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _report(self, epoch: int, logs: Logs | None, step: int = 0, saved: bool = True) -> None:
        self._reported = True
        numbers = {name: _plain(value) for name, value in (logs or {}).items()}
        checkpoint = None
        if saved and self.strategy.is_chief:
            checkpoint = ray.train.Checkpoint.from_directory(self.directory)
        ray.train.report({**numbers, "epoch": epoch, "step": step}, checkpoint=checkpoint)


def _plain(value: Array | float) -> float | list[Tree]:
    return float(value) if np.ndim(value) == 0 else np.asarray(value).tolist()

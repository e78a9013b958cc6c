"""The seed of every rank's shuffling while the script has set none."""

from __future__ import annotations

from dtk.compat import tf_replicas


class ShuffleSeed:
    """Seed of the order of rows, for scripts that leave it to dtk.

    Example:
        >>> ShuffleSeed(None).of_epoch(3) is None
        True
    """

    def __init__(self, chosen: int | None):
        self.value = self._in_force = chosen

    def of_epoch(self, epoch: int) -> int | None:
        """Return the seed of an epoch; None once the script has set a global seed itself."""
        if tf_replicas.global_seed() != self._in_force:
            self.value = None
        return None if self.value is None else (self.value + epoch) % 2**31

    def restore(self, value: int, in_force: int | None) -> None:
        """Continue from a checkpoint's seed."""
        self.value, self._in_force = value, in_force

"""A report on parameter servers: bytes held, traffic of workers, and staleness of weights."""

from __future__ import annotations

from dtk.callbacks.base import StrategyCallback
from dtk.nests import Logs
from dtk.strategies import ParameterServerStrategy


class ServerReport(StrategyCallback):
    """Print a report of a parameter-server job after `fit`; put its traffic into the logs.

    Each epoch's logs get `pulled_bytes` and `pushed_bytes`, the mean of a worker's step. After
    training the callback prints the bytes on each server, the traffic of each worker, the results
    that were not needed and the slices computed again for lost workers, and the staleness of all
    steps as a histogram. The optimizer's slot variables are on the servers of their weights and are
    not counted.

    Attributes:
        epochs: For each epoch, staleness -> number of steps.

    Raises:
        ValueError: At train begin, if the strategy has no servers.

    Example:
        >>> import dtk
        >>> report = dtk.callbacks.ServerReport()
        >>> model.fit(x, y, callbacks=[report])  # doctest: +SKIP
        ServerReport: 2 servers hold 24.4 and 24.1 kB of weights (largest 1.01 of the mean)
        ServerReport: worker 0: 88 steps, pulled 19.2 kB and pushed 19.2 kB in each
        ServerReport: worker 1: 88 steps, pulled 19.2 kB and pushed 19.2 kB in each
        ServerReport: staleness (missing steps x times): 0 x 9, 1 x 31, 2 x 97, 3 x 39
    """

    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[dict[int, int]] = []
        self._before: list[dict[str, int]] = []

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Note the traffic before training."""
        if not isinstance(self.strategy, ParameterServerStrategy):
            raise ValueError(
                f"ServerReport: {type(self.strategy).__name__} has no parameter servers; leave "
                "this callback out, or use dtk.strategies.ParameterServerStrategy"
            )
        self.epochs = []
        self._start = self._before = self.strategy.traffic
        self._wasted = self._waste()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Add the epoch's traffic to its logs."""
        self.trainer.flush()
        moved = _moved(self._before, self.strategy.traffic)
        self._before = self.strategy.traffic
        steps = max(1, sum(worker["steps"] for worker in moved))
        if logs is not None:
            for name in ("pulled", "pushed"):
                logs[f"{name}_bytes"] = sum(worker[name] for worker in moved) / steps
        self.epochs.append(dict(self.strategy.schedule_of(self.model).statistics.histogram))

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Print the report."""
        strategy = self.strategy
        held = strategy.placement
        mean = sum(held) / len(held)
        servers = f"{len(held)} servers hold" if len(held) > 1 else "1 server holds"
        self.say(
            f"{servers} {_listed([f'{n / 1e3:.1f}' for n in held])} kB of weights (largest "
            f"{max(held) / mean if mean else 1:.2f} of the mean)"
        )
        for index, worker in enumerate(_moved(self._start, strategy.traffic)):
            steps = max(1, worker["steps"])
            self.say(
                f"worker {index}: {worker['steps']} steps, pulled "
                f"{worker['pulled'] / steps / 1e3:.1f} kB and pushed "
                f"{worker['pushed'] / steps / 1e3:.1f} kB in each"
            )
        ages: dict[int, int] = {}
        for histogram in self.epochs:
            for age, steps in histogram.items():
                ages[age] = ages.get(age, 0) + steps
        dropped, retried = (
            now - then for now, then in zip(self._waste(), self._wasted, strict=True)
        )
        if dropped or retried:
            self.say(
                f"{dropped} results were not needed any more, {retried} slices were computed again "
                "for a lost worker"
            )
        told = ", ".join(f"{age} x {ages[age]}" for age in sorted(ages))
        self.say(f"staleness (missing steps x times): {told or 'no step'}")

    def _waste(self) -> tuple[int, int]:
        """Return the numbers of results not needed and of lost slices handed out again, so far."""
        schedule = self.strategy.schedule_of(self.model)
        return schedule.dropped, schedule.retried


def _moved(before: list[dict[str, int]], after: list[dict[str, int]]) -> list[dict[str, int]]:
    return [
        {name: now[name] - then[name] for name in now}
        for then, now in zip(before, after, strict=True)
    ]


def _listed(words: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))

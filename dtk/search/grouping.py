"""Trials side by side: the world cut into groups of workers, each with a strategy of its own."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import keras
import optuna

from dtk.communicators.base import Communicator
from dtk.errors import at_rank
from dtk.search.rounds import Failure, RoundMessage, Rounds
from dtk.strategies import AllReduceStrategy, devices, start

_Made = TypeVar("_Made")


class GroupStrategy(AllReduceStrategy):
    """The strategy of one group, in whose trials no model of all workers can be trained."""

    def __init__(self, part: Communicator, over: AllReduceStrategy | None):
        super().__init__(part)
        self._over = over

    @contextlib.contextmanager
    def meeting(self, meet: Callable[[str], None]) -> Iterator[None]:
        """See `DtkStrategy.meeting`; also refuses models of the strategy over all workers."""
        over = self._over
        if over is None or over.size == self.size:
            with super().meeting(meet):
                yield
            return

        def refuse(where: str) -> None:
            told = (
                f"{where}: a trial of a group uses a model of the strategy over all workers, "
                "and the other groups are at trials of their own; compile it in "
                "group.strategy.scope()"
            )
            raise ValueError(at_rank(over.rank, told))

        with super().meeting(meet), over.meeting(refuse):
            yield


class Group:
    """The workers that run this process's trials; made by `groups`.

    Leave it by `with`, or call `wait` at the end: a process that ended while others train would end
    the job.

    Args:
        world: Over all workers.
        workers_per_trial: Workers of a group.
        over: The strategy over all workers, where there is one.

    Attributes:
        index: Number of the group, from 0.
        count: Number of groups.
        strategy: Over the workers of the group; models are compiled in its scope.
    """

    def __init__(
        self, world: Communicator, workers_per_trial: int, over: AllReduceStrategy | None = None
    ):
        self._rounds = Rounds(world, patience=60.0)
        self._world = world
        self.index = world.rank // workers_per_trial
        self.count = world.size // workers_per_trial
        self.strategy = GroupStrategy(world.split(self.index), over)

    def study(
        self,
        name: str,
        storage: str | Path | optuna.storages.BaseStorage,
        *,
        direction: str = "minimize",
        sampler: optuna.samplers.BaseSampler | None = None,
        pruner: optuna.pruners.BasePruner | None = None,
    ) -> optuna.Study | None:
        """Create or load the study that all groups share. Every rank of the world calls it.

        Args:
            name: The study's.
            storage: A file, which is made and must be seen by all hosts; a database's URL such as
                "postgresql+psycopg://user@host/database"; or a storage of Optuna's.
            direction: "minimize" or "maximize".
            sampler: This group's: with a seed of its own (`TPESampler(seed=7 + group.index)`), or
                groups try the same parameters.
            pruner: This group's.

        Returns:
            The study on rank 0 of each group, None on others.

        Raises:
            Exception: What the storage has raised on any rank, on all of them.
        """

        def make() -> optuna.Study:
            return optuna.create_study(
                study_name=name,
                storage=_storage(storage),
                direction=direction,
                sampler=sampler,
                pruner=pruner,
                load_if_exists=True,
            )

        # One makes tables, files and the study; the others find them.
        first = self._agreed("the study", make if self._world.rank == 0 else None)
        other = self.strategy.is_chief and self._world.rank != 0
        second = self._agreed("the study of other groups", make if other else None)
        return second if first is None else first

    def wait(self) -> None:
        """Return once all groups have called it, with one random seed for all workers again."""
        # Of all: the root of a broadcast need not wait for those that it sends to.
        first, *_ = self._world.allgather_object(random.getrandbits(31))
        keras.utils.set_random_seed(first)

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.wait()

    def _agreed(self, what: str, make: Callable[[], _Made] | None) -> _Made | None:
        """Call a function on some ranks; what it raises on one is raised on all."""
        made, mine = None, None
        try:
            made = make() if make is not None else None
        except Exception as error:
            mine = error
        failure = None if mine is None else Failure.of(mine, self._world.rank)
        messages = self._rounds.meet(RoundMessage(what, failure=failure))
        failed = next((one.failure for one in messages if one.failure is not None), None)
        if failed is not None:
            raise mine or failed.error()
        return made


def groups(over: AllReduceStrategy | Communicator, workers_per_trial: int = 1) -> Group:
    """Cut the workers into groups that run trials side by side. Every rank calls it.

    Rank 0 of each group has the study, by a storage that all share. Ranks next to each other, and
    so on one host where possible, are in one group.

    Args:
        over: A strategy over all workers, or their communicator.
        workers_per_trial: Workers of a group, of which the world must hold a multiple.

    Returns:
        This process's group.

    Raises:
        ValueError: The workers cannot be cut so.
        TypeError: `over` is another strategy.

    Example:
        >>> import dtk
        >>> strategy = dtk.strategies.AllReduceStrategy("local")
        >>> with dtk.search.groups(strategy, workers_per_trial=1) as group:
        ...     group.index, group.count, group.strategy.size
        (0, 1, 1)
    """
    world = over.communicator if isinstance(over, AllReduceStrategy) else over
    if not isinstance(world, Communicator):
        raise TypeError(
            f"groups over {type(over).__name__}; give dtk.strategies.AllReduceStrategy(), or "
            "dtk.communicators.create(): other strategies keep their workers to themselves"
        )
    if workers_per_trial < 1 or world.size % workers_per_trial:
        told = (
            f"workers_per_trial={workers_per_trial} does not divide {world.size} workers; "
            f"use one of {[n for n in range(1, world.size + 1) if world.size % n == 0]}"
        )
        raise ValueError(at_rank(world.rank, told))
    if world is over and world.size > 1:  # what a strategy over all of them has done
        devices.pin(world)
        start.end_together(world)
    return Group(world, workers_per_trial, over if isinstance(over, AllReduceStrategy) else None)


def _storage(
    given: str | Path | optuna.storages.BaseStorage,
) -> str | optuna.storages.BaseStorage:
    """Return what Optuna takes: a file's name becomes a journal."""
    if isinstance(given, optuna.storages.BaseStorage) or "://" in str(given):
        return given
    file = Path(given)
    file.parent.mkdir(parents=True, exist_ok=True)
    backend = optuna.storages.journal.JournalFileBackend(str(file))
    return optuna.storages.JournalStorage(backend)

"""A grid of processes: one dimension holds the parts of a model, the other its replicas."""

from __future__ import annotations

from dataclasses import dataclass

from dtk.communicators.base import Communicator
from dtk.communicators.local import LocalCommunicator
from dtk.errors import at_rank
from dtk.exchange import Auto
from dtk.exchange.base import Exchange


@dataclass(frozen=True)
class Grid:
    """The two groups of a process.

    Rank r has place `r % parts` in its model and place `r // parts` among replicas. So the parts of
    a model are on neighbouring ranks, which launchers put on one host if possible.
    """

    data: Communicator  # the processes that hold the same part, one of each replica
    model: Communicator  # the processes that hold the parts of one replica

    def learn_from(self, world: Communicator) -> None:
        """Give both groups what all ranks know: whether processors are alike, and the costs."""
        for group in (self.data, self.model):
            if group is not world:
                group.learn(world.alike, world.costs)

    def check_exchange(self, exchange: Exchange) -> None:
        """Check that an exchange works with models in parts."""
        if self.model.size > 1 and isinstance(exchange, Auto):
            raise ValueError(
                at_rank(
                    self.model.rank,
                    f"exchange={exchange} with model_parallel={self.model.size}: the processes "
                    "that hold parts of one model might choose differently; name the exchange, "
                    'such as "fp16"',
                )
            )


def make_grid(world: Communicator, parts: int) -> Grid:
    """Divide ranks into models of `parts` parts. Every rank calls it.

    Example:
        >>> from dtk.communicators.local import LocalCommunicator
        >>> make_grid(LocalCommunicator(), 1).model.size
        1
    """
    if isinstance(parts, bool) or not isinstance(parts, int) or parts < 1:
        raise ValueError(
            at_rank(world.rank, f"model_parallel={parts!r}; expected a whole number, 1 or more")
        )
    if world.size % parts:
        fits = [n for n in range(1, world.size + 1) if world.size % n == 0]
        raise ValueError(
            at_rank(
                world.rank,
                f"model_parallel={parts} with {world.size} processes: each model takes {parts} of "
                f"them, and the rest would be left over; use one of {fits}, or start a multiple of "
                f"{parts}, such as `dtk run -n {parts * max(1, round(world.size / parts))}`",
            )
        )
    if parts == 1:
        return Grid(world, LocalCommunicator(world.hosts[world.rank] if world.hosts else None))
    data = world.split(world.rank % parts, world.rank)
    return Grid(data, world.split(world.rank // parts, world.rank))

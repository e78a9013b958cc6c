"""What follows when a job fails, told from what has happened. Starts and waits for nothing.

          ┌──────────── enough hosts answer ────────────┐
          v                                             │
Run ──> ended ──┬─ with 0, or stopped by the user ──> Over (0, or 128 + signal)
                ├─ by a mistake before the first step > Over (its code)
                ├─ and no restart is left ──────────> Over (its code)
                ├─ else: one restart is used ───────> Wait (1, 2, 4, ... 60 s) ──> look at hosts
                └─ stopped as a host is back ───────> look at hosts
                                                        │
                        too few for 10 minutes: Over <──┴──> too few: Wait (5 s)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import TypeAlias

from dtk.cluster import Host

LONGEST_WAIT = 60.0  # seconds between a failure and the next attempt
LOOK_EVERY = 5.0  # seconds between two looks at hosts that are too few
PATIENCE = 600.0  # seconds for which enough hosts are waited for


@dataclasses.dataclass(frozen=True)
class StartJob:
    """Start the job."""

    hosts: tuple[Host, ...]  # where; this machine when empty
    workers: int  # how many ranks
    attempt: int  # how often it was started before


@dataclasses.dataclass(frozen=True)
class AwaitHosts:
    """Wait, then look which hosts answer."""

    seconds: float  # how long
    why: str  # for the user


@dataclasses.dataclass(frozen=True)
class Over:
    """Start no more."""

    code: int  # exit code
    why: str = ""  # for the user; "" where there is nothing to add


Action: TypeAlias = StartJob | AwaitHosts | Over


class Attempts:
    """Decides whether, when, where and with how many ranks a job is started again.

    >>> attempts = Attempts((), 2, None, 1)
    >>> attempts.begin().workers
    2
    >>> attempts.ended(137)
    Wait(seconds=1.0, why='starting the job again in 1 s (restart 1 of 1)')
    >>> attempts.looked([])
    Run(hosts=(), workers=2, attempt=1)
    >>> attempts.ended(137).code
    137
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        workers: int | None,
        min_workers: int | None,
        max_restarts: int,
    ) -> None:
        self._hosts = tuple(hosts)
        self._wanted = sum(h.slots for h in self._hosts) if workers is None else workers
        self._fewest = self._wanted if min_workers is None else min_workers
        self._most = max_restarts
        self._started = 0
        self._code = 0
        self._waited = 0.0
        self._running: StartJob | None = None
        self.restarts = 0

    def begin(self) -> StartJob:
        """Return the first attempt, of all ranks: a mistyped host is likelier than a lost one."""
        return self._run(self._hosts, self._wanted)

    def ended(self, code: int, stopped: bool = False, mistake: bool = False) -> AwaitHosts | Over:
        """Decide what follows the end of an attempt."""
        self._code, self._waited = code, 0.0
        if code == 0 or stopped or not self._most:
            return Over(code)
        if mistake and self._started == 1:
            return Over(code, "not started again: it failed before the ranks did anything together")
        if self.restarts >= self._most:
            return Over(code, f"no restart is left of {self._most}")
        self.restarts += 1
        seconds = min(LONGEST_WAIT, 2.0 ** (self.restarts - 1))
        why = f"starting the job again in {seconds:g} s (restart {self.restarts} of {self._most})"
        return AwaitHosts(seconds, why)

    def looked(self, answering: Collection[str]) -> Action:
        """Decide where the next attempt runs."""
        hosts = tuple(host for host in self._hosts if host.name in answering)
        workers = self._workers(hosts)
        if workers >= self._fewest:
            return self._run(hosts, workers)
        missing = ", ".join(host.name for host in self._hosts if host not in hosts)
        if self._waited >= PATIENCE:
            return Over(
                self._code or 1,
                f"not started again: no answer from {missing} for {PATIENCE / 60:g} minutes, and "
                f"{workers} of at least {self._fewest} workers fit the other hosts",
            )
        first = not self._waited
        self._waited += LOOK_EVERY
        return AwaitHosts(LOOK_EVERY, f"waiting until {missing} can be reached" if first else "")

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the hosts that the running attempt had to leave out."""
        running = self._running
        if running is None or running.workers == self._wanted:
            return ()
        return tuple(host.name for host in self._hosts if host not in running.hosts)

    def _workers(self, hosts: Sequence[Host]) -> int:
        slots = sum(host.slots for host in hosts)
        return min(self._wanted, slots) if self._hosts else self._wanted

    def _run(self, hosts: tuple[Host, ...], workers: int) -> StartJob:
        self._running = StartJob(hosts, workers, self._started)
        self._started += 1
        return self._running

"""Starting a job of ranks that wait for each other again, after it failed.

`Attempts` tells from what has happened what follows, `Supervisor` does it.

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

import concurrent.futures
import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeAlias

from dtk.cluster import Host
from dtk.errors import ClusterError
from dtk.launch.job import Job
from dtk.launch.starter import PortTakenError

LONGEST_WAIT = 60.0  # seconds between a failure and the next attempt
LOOK_EVERY = 5.0  # seconds between two looks at hosts that are too few
PATIENCE = 600.0  # seconds for which enough hosts are waited for
_PROBE_EVERY = 30.0  # seconds between two looks at a host that a running job does without
# Another program may take a port between the plan and the start of the job.
_PLANS = 3
_AT_ONCE = 32  # hosts that are asked at a time


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
    """Decides whether, when, where and with how many ranks a job is started again."""

    def __init__(
        self, hosts: Sequence[Host], workers: int | None, min_workers: int | None, max_restarts: int
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
        slots = sum(host.slots for host in hosts)
        workers = min(self._wanted, slots) if self._hosts else self._wanted
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

    def _run(self, hosts: tuple[Host, ...], workers: int) -> StartJob:
        self._running = StartJob(hosts, workers, self._started)
        self._started += 1
        return self._running


class Supervisor:
    """Starts a job until it succeeds, or may not be started again."""

    def __init__(
        self,
        attempts: Attempts,
        make: Callable[[StartJob], Job],
        answers: Callable[[str], bool],
        say: Callable[[str], None],
        probe_every: float = _PROBE_EVERY,
    ) -> None:
        self.jobs: list[Job] = []
        self._attempts = attempts
        self._make = make
        self._answers = answers
        self._say = say
        self._probe_every = probe_every

    def run(self, hosts: Collection[str] = ()) -> int:
        """See the job to its end."""
        action: Action = self._attempts.begin()
        while not isinstance(action, Over):
            if isinstance(action, AwaitHosts):
                if action.why:
                    self._say(action.why)
                time.sleep(action.seconds)
                action = self._attempts.looked(self._answering(hosts))
            else:
                action = self._attempt(action, hosts)
        if action.why:
            self._say(action.why)
        return action.code

    def _attempt(self, run: StartJob, hosts: Collection[str]) -> Action:
        if missing := self._attempts.missing:
            self._say(
                f"going on with {run.workers} workers, without {', '.join(missing)}, until it "
                "answers again"
            )
        try:
            with self._started(run) as job:
                grown = self._wait(job)
                code, stopped = job.wait(), job.stopped
        except ClusterError as error:
            if not run.attempt:
                raise
            # A host may go between being asked and being used.
            self._say(str(error))
            return self._attempts.ended(1)
        if grown and code:
            return self._attempts.looked(self._answering(hosts))
        return self._attempts.ended(code, stopped, job.failed_before_working_together)

    def _started(self, run: StartJob) -> Job:
        for _ in range(_PLANS - 1):
            self.jobs.append(self._make(run))
            with contextlib.suppress(PortTakenError):
                return self.jobs[-1].start()
        self.jobs.append(self._make(run))
        return self.jobs[-1].start()

    def _wait(self, job: Job) -> bool:
        """Wait for the end of a job; end it where hosts that it does without answer again."""
        answered: set[str] = set()
        while True:
            try:
                job.wait(self._probe_every if self._attempts.missing else None)
                return False
            except TimeoutError:
                now = self._answering(self._attempts.missing)
            # Twice in a row: a host that is starting answers before it is ready.
            back = sorted(now & answered)
            answered = now
            if back:
                self._say(f"{', '.join(back)} answers again: the job is ended, to go on with it")
                job.stop()
                return True

    def _answering(self, hosts: Iterable[str]) -> set[str]:
        names = list(hosts)
        if not names:
            return set()
        with concurrent.futures.ThreadPoolExecutor(min(_AT_ONCE, len(names))) as pool:
            return {
                name
                for name, answers in zip(names, pool.map(self._answers, names), strict=True)
                if answers
            }

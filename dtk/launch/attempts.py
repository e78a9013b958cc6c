"""Starting a job of ranks that wait for each other again, after it failed.

          ┌──────────── enough hosts answer ────────────┐
          v                                             │
attempt ──> ended ──┬─ with 0, or stopped by the user ──> over (0, or 128 + signal)
                    ├─ by a mistake before the first step > over (its code)
                    ├─ and no restart is left ──────────> over (its code)
                    ├─ else: one restart is used ───────> wait (1, 2, 4, ... 60 s) ──> look at hosts
                    └─ stopped as a host is back ───────> look at hosts
                                                          │
                          too few for 10 minutes: over <──┴──> too few: wait (5 s)
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence

from dtk.cluster import Host
from dtk.errors import ClusterError
from dtk.launch.events import EventLog
from dtk.launch.job import Job
from dtk.launch.plan import JobSpec
from dtk.launch.starter import PortTakenError

LONGEST_WAIT = 60.0  # seconds between a failure and the next attempt
LOOK_EVERY = 5.0  # seconds between two looks at hosts that are too few
PATIENCE = 600.0  # seconds for which enough hosts are waited for
# Another program may take a port between the plan and the start of the job.
_PLANS = 3
_AT_ONCE = 32  # hosts that are asked at a time


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One start of the job."""

    hosts: tuple[Host, ...]  # where; this machine when empty
    workers: int  # how many ranks
    number: int  # how often it was started before


@dataclasses.dataclass
class Attempts:
    """Starts a job until it succeeds, or may not be started again."""

    spec: JobSpec
    make: Callable[[Attempt], Job]  # plans the job of an attempt
    answers: Callable[[str], bool]  # whether a host answers
    say: Callable[[str], None]
    probe_every: float = 30.0  # seconds between two looks at a host that a running job does without
    jobs: list[Job] = dataclasses.field(default_factory=list)
    events: EventLog = dataclasses.field(default_factory=EventLog)
    _restarts: int = 0
    _code: int = 0

    def __post_init__(self) -> None:
        spec = self.spec
        slots = sum(host.slots for host in spec.hosts)
        self._wanted = len(spec.processes) or (slots if spec.workers is None else spec.workers)
        self._fewest = self._wanted if spec.min_workers is None else spec.min_workers
        # With servers, the job starts its workers again itself.
        self._most = 0 if spec.ps else spec.max_restarts

    def run(self) -> int:
        """See the job to its end, and return its exit code."""
        attempt: Attempt | None = self._first
        while attempt is not None:
            code, goes_on = self._run(attempt)
            if not goes_on:
                return code
            attempt = self._next(attempt)
        return code or 1

    def _run(self, attempt: Attempt) -> tuple[int, bool]:
        """See one attempt to its end; return its exit code, and whether another may follow."""
        missing = self._missing(attempt)
        if missing:
            self.say(
                f"going on with {attempt.workers} workers, without {', '.join(missing)}, until it "
                "answers again"
            )
        try:
            with self._started(attempt) as job:
                is_for_more_hosts = self._wait(job, missing)
                code, stopped = job.wait(), job.stopped
        except ClusterError as error:
            if not attempt.number:
                raise
            # A host may go between being asked and being used.
            self.say(str(error))
            return 1, self._restart(1)
        if is_for_more_hosts and code:
            return self._code, True
        if code == 0 or stopped or not self._most:
            return code, False
        if job.failed_before_working_together and not attempt.number:
            self.say("not started again: it failed before the ranks did anything together")
            return code, False
        return code, self._restart(code)

    def start(self) -> Job:
        """Start the job once, and return it."""
        return self._started(self._first)

    @property
    def _first(self) -> Attempt:
        # Of all ranks: a mistyped host is likelier than a lost one.
        return Attempt(self.spec.hosts, self._wanted, 0)

    def _started(self, attempt: Attempt) -> Job:
        for _ in range(_PLANS - 1):
            self.jobs.append(self.make(attempt))
            with contextlib.suppress(PortTakenError):
                return self.jobs[-1].start()
        self.jobs.append(self.make(attempt))
        return self.jobs[-1].start()

    def _wait(self, job: Job, missing: Sequence[str]) -> bool:
        """Wait for the end of a job; end it where hosts that it does without answer again."""
        answered: set[str] = set()
        while True:
            try:
                job.wait(self.probe_every if missing else None)
                return False
            except TimeoutError:
                now = self._answering(missing)
            # Twice in a row: a host that is starting answers before it is ready.
            back = sorted(now & answered)
            answered = now
            if back:
                self.say(f"{', '.join(back)} answers again: the job is ended, to go on with it")
                job.stop()
                return True

    def _restart(self, code: int) -> bool:
        """Use one restart after a failure, and wait a while; return whether there was one."""
        self._code = code
        if self._restarts >= self._most:
            self.say(f"no restart is left of {self._most}")
            return False
        self._restarts += 1
        seconds = min(LONGEST_WAIT, 2.0 ** (self._restarts - 1))
        count = f"restart {self._restarts} of {self._most}"
        self.say(f"starting the job again in {seconds:g} s ({count})")
        self.events.record("restart", number=self._restarts, code=code)
        time.sleep(seconds)
        return True

    def _next(self, before: Attempt) -> Attempt | None:
        """Wait until enough hosts answer for another attempt; None if they do not for long."""
        waited = 0.0
        while True:
            answering = self._answering(host.name for host in self.spec.hosts)
            hosts = tuple(host for host in self.spec.hosts if host.name in answering)
            slots = sum(host.slots for host in hosts) if self.spec.hosts else self._wanted
            attempt = Attempt(hosts, min(self._wanted, slots), before.number + 1)
            if attempt.workers >= self._fewest:
                return attempt
            missing = ", ".join(host.name for host in self.spec.hosts if host not in hosts)
            if waited >= PATIENCE:
                self.say(
                    f"not started again: no answer from {missing} for {PATIENCE / 60:g} minutes, "
                    f"and {attempt.workers} of at least {self._fewest} workers fit the other hosts"
                )
                return None
            if not waited:
                self.say(f"waiting until {missing} can be reached")
            waited += LOOK_EVERY
            time.sleep(LOOK_EVERY)

    def _missing(self, attempt: Attempt) -> list[str]:
        """Return the names of the hosts that an attempt has to leave out."""
        is_whole = attempt.workers == self._wanted
        return [host.name for host in self.spec.hosts if not is_whole and host not in attempt.hosts]

    def _answering(self, hosts: Iterable[str]) -> set[str]:
        names = list(hosts)
        with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
            answers = zip(names, pool.map(self.answers, names), strict=True)
            return {name for name, is_there in answers if is_there}

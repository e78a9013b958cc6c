"""Carrying out what `Attempts` decides: one job after the other."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Collection, Iterable

from dtk.errors import ClusterError
from dtk.launch.attempts.states import Action, Attempts, AwaitHosts, Over, StartJob
from dtk.launch.job import Job
from dtk.launch.starter import PortTakenError

_PROBE_EVERY = 30.0  # seconds between two looks at a host that a running job does without
# Another program may take a port between the plan and the start of the job.
_PLANS = 3
_AT_ONCE = 32  # hosts that are asked at a time


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
        self._say_size(run)
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
        plans = 0
        while True:
            self.jobs.append(self._make(run))
            plans += 1
            try:
                return self.jobs[-1].start()
            except PortTakenError:
                if plans == _PLANS:
                    raise

    def _say_size(self, run: StartJob) -> None:
        missing = self._attempts.missing
        if missing:
            self._say(
                f"going on with {run.workers} workers, without {', '.join(missing)}, until it "
                "answers again"
            )

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


def answers(host: str, ask: Callable[[str, int], object]) -> bool:
    """Return whether a host can run ranks.

    >>> from dtk.launch import ssh
    >>> answers("localhost", ssh.survey)
    True
    """
    try:
        ask(host, 0)
    except ClusterError:
        return False
    return True

"""The one way in which every command starts a job: planned, seen to its end, and started again.

          ┌──────────── enough hosts answer ────────────┐
          v                                             │
attempt ──> ended ──┬─ with 0, or stopped by the user ──> over (0, or 128 + signal)
                    ├─ by a mistake before the first step > over (its code)
                    ├─ and no restart is left ──────────> over (its code)
                    ├─ else: one restart is used ───────> wait (1, 2, 4, ... 60 s) ──> look at hosts
                    └─ stopped as a host is back ───────> look at hosts
                                                          │
                          too few for 10 minutes: over <──┴──> too few: wait (5 s)

Parameter servers spare a worker: such a job starts it again itself, and is not started again here.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TextIO

from dtk.cluster import Host, recording
from dtk.cluster.variables import RESTARTS, SAVE_GRACE
from dtk.errors import ClusterError
from dtk.launch import job_options, screen, ssh, step_settings
from dtk.launch.events import EventLog
from dtk.launch.job import Job
from dtk.launch.plan import JobSpec, Process, assign
from dtk.launch.starter import PortTakenError

LONGEST_WAIT = 60.0  # seconds between a failure and the next attempt
LOOK_EVERY = 5.0  # seconds between two looks at hosts that are too few
PATIENCE = 600.0  # seconds for which enough hosts are waited for
_PROBE_EVERY = 30.0  # seconds between two looks at a host that a running job does without
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
class JobRun:
    """Starts what was asked for, again where that is allowed, and watches it until it is over."""

    spec: JobSpec
    stdout: TextIO | None = None
    stderr: TextIO | None = None
    log: EventLog = dataclasses.field(default_factory=EventLog)
    jobs: list[Job] = dataclasses.field(default_factory=list)  # of all attempts so far
    _restarts: int = 0
    _code: int = 0  # of the failure for which the last restart was used

    def __post_init__(self) -> None:
        spec = self.spec
        slots = sum(host.slots for host in spec.hosts)
        self._wanted = len(spec.processes) or (slots if spec.workers is None else spec.workers)
        self._fewest = self._wanted if spec.min_workers is None else spec.min_workers
        self._most = 0 if spec.ps else spec.max_restarts
        # Of all ranks: a mistyped host is likelier than a lost one.
        self._first = Attempt(spec.hosts, self._wanted, 0)

    def start(self) -> Job:
        """Start once, and return what runs."""
        return self._start(self._first)

    def wait(self) -> int:
        """Start, again where that is allowed, and return the exit code of the last attempt."""
        attempt: Attempt | None = self._first
        while attempt is not None:
            code, goes_on = self._see_to_its_end(attempt)
            if not goes_on:
                return code
            attempt = self._next(attempt)
        return code or 1

    def _see_to_its_end(self, attempt: Attempt) -> tuple[int, bool]:
        """Make one attempt; return its exit code, and whether another may follow."""
        is_whole = attempt.workers == self._wanted
        missing = [
            host.name for host in self.spec.hosts if not is_whole and host not in attempt.hosts
        ]
        if missing:
            screen.say(
                f"going on with {attempt.workers} workers, without {', '.join(missing)}, until it "
                "answers again"
            )
        try:
            with self._start(attempt) as job:
                is_for_more_hosts = self._wait(job, missing)
                code, stopped = job.wait(), job.stopped
        except ClusterError as error:
            if not attempt.number:
                raise
            # A host may go between being asked and being used.
            screen.say(str(error))
            return 1, self._restart(1)
        if is_for_more_hosts and code:
            return self._code, True
        if code == 0 or stopped or not self._most:
            return code, False
        if job.failed_before_working_together and not attempt.number:
            screen.say("not started again: it failed before the ranks did anything together")
            return code, False
        return code, self._restart(code)

    def _start(self, attempt: Attempt) -> Job:
        for _ in range(_PLANS - 1):
            self.jobs.append(self._made(attempt))
            with contextlib.suppress(PortTakenError):
                return self.jobs[-1].start()
        self.jobs.append(self._made(attempt))
        return self.jobs[-1].start()

    def _wait(self, job: Job, missing: Sequence[str]) -> bool:
        """Wait for the end of a job; end it where hosts that it does without answer again."""
        answered: set[str] = set()
        while True:
            try:
                job.wait(_PROBE_EVERY if missing else None)
                return False
            except TimeoutError:
                now = self._answering(missing)
            # Twice in a row: a host that is starting answers before it is ready.
            back = sorted(now & answered)
            answered = now
            if back:
                screen.say(f"{', '.join(back)} answers again: the job is ended, to go on with it")
                job.stop()
                return True

    # --- between two attempts ---

    def _restart(self, code: int) -> bool:
        """Use one restart after a failure, and wait a while; return whether there was one."""
        self._code = code
        if self._restarts >= self._most:
            screen.say(f"no restart is left of {self._most}")
            return False
        self._restarts += 1
        seconds = min(LONGEST_WAIT, 2.0 ** (self._restarts - 1))
        count = f"restart {self._restarts} of {self._most}"
        screen.say(f"starting the job again in {seconds:g} s ({count})")
        self.log.record("restart", number=self._restarts, code=code)
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
                screen.say(
                    f"not started again: no answer from {missing} for {PATIENCE / 60:g} minutes, "
                    f"and {attempt.workers} of at least {self._fewest} workers fit the other hosts"
                )
                return None
            if not waited:
                screen.say(f"waiting until {missing} can be reached")
            waited += LOOK_EVERY
            time.sleep(LOOK_EVERY)

    def _answering(self, hosts: Iterable[str]) -> set[str]:
        names = list(hosts)
        with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
            answers = zip(names, pool.map(self._answers, names), strict=True)
            return {name for name, is_there in answers if is_there}

    def _answers(self, host: str) -> bool:
        with contextlib.suppress(ClusterError):
            ssh.survey(host, 0, self.spec.remote_shell)
            return True
        return False

    # --- the job of an attempt ---

    def _made(self, attempt: Attempt) -> Job:
        spec = self.spec
        processes = spec.processes or self._with_variables(self._planned(attempt), attempt.number)
        places = {one.name: one.host for one in processes}
        self.log.begin_attempt(attempt.number, places, 0 if spec.ps else len(processes))
        return Job(
            dataclasses.replace(spec, processes=tuple(processes)),
            events=self.log,
            append=attempt.number > 0,
            stdout=self.stdout,
            stderr=self.stderr,
        )

    def _planned(self, attempt: Attempt) -> list[Process]:
        spec, facts = self.spec, dict[str, ssh.HostFacts]()

        def survey(host: str, ports: int) -> ssh.HostFacts:
            facts[host] = ssh.survey(host, ports, spec.remote_shell)
            return facts[host]

        plan = functools.partial(
            assign,
            spec.command,
            attempt.workers,
            hosts=attempt.hosts,
            ps=spec.ps,
            evaluator=spec.evaluator,
            bind=spec.bind,
            survey=survey,
        )
        processes = plan(communicator=spec.communicator)
        is_free = spec.communicator == "auto" and not spec.ps and not attempt.hosts
        if is_free and len(processes) > 1:
            # Measurements are kept by the number of threads of a rank, which is known only now.
            best = step_settings.communicator(spec.command, processes[0].env, self._environ)
            if best in job_options.installed():
                processes = plan(communicator=best)
        for notice in ssh.compare(facts):
            screen.say(notice)
        return processes

    def _with_variables(self, processes: Sequence[Process], attempt: int) -> list[Process]:
        """Give each rank the variables of the job, and the settings that are fastest for it."""
        spec = self.spec
        variables = {
            **spec.variables,
            **({SAVE_GRACE: f"{spec.save_grace:g}"} if spec.save_grace else {}),
            recording.VARIABLE: "steps" if spec.records_steps else "summary",
        }
        if not spec.ps:
            variables[RESTARTS] = str(attempt)
        complete, used = [], None
        for one in processes:
            env, settings = step_settings.apply(one.argv, {**one.env, **variables}, self._environ)
            used = used or settings
            complete.append(one.with_env(env))
        if used is not None and not attempt:
            screen.say(f"{step_settings.written(used.variables)}, as `dtk tune` has measured")
        return complete

    @property
    def _environ(self) -> Mapping[str, str]:
        return {**os.environ, **self.spec.variables}

"""The one way in which every command plans a job, starts it, and sees it to its end."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import TextIO

from dtk.cluster import recording
from dtk.cluster.variables import RESTARTS, SAVE_GRACE
from dtk.errors import ClusterError
from dtk.launch import job_options, screen, ssh, step_settings
from dtk.launch.attempts import Attempt, Attempts
from dtk.launch.events import EventLog
from dtk.launch.job import Job
from dtk.launch.plan import JobSpec, Process, assign


@dataclasses.dataclass
class JobRun:
    """Starts what was asked for, again where that is allowed, and watches it until it is over."""

    spec: JobSpec
    log: EventLog = dataclasses.field(default_factory=EventLog)
    stdout: TextIO | None = None
    stderr: TextIO | None = None
    jobs: list[Job] = dataclasses.field(default_factory=list)  # of all attempts so far

    def wait(self) -> int:
        """Start, again where that is allowed, and return the exit code of the last attempt."""
        return self._attempts().run()

    def start(self) -> Job:
        """Start once, and return what runs."""
        return self._attempts().start()

    def _attempts(self) -> Attempts:
        return Attempts(
            self.spec, self._made, self._answers, screen.say, jobs=self.jobs, events=self.log
        )

    @property
    def _environ(self) -> Mapping[str, str]:
        return {**os.environ, **self.spec.variables}

    def _answers(self, host: str) -> bool:
        with contextlib.suppress(ClusterError):
            ssh.survey(host, 0, self.spec.remote_shell)
            return True
        return False

    def _made(self, attempt: Attempt) -> Job:
        """Plan the job of an attempt."""
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

        def planned(communicator: str) -> list[Process]:
            return assign(
                spec.command,
                attempt.workers,
                hosts=attempt.hosts,
                communicator=communicator,
                ps=spec.ps,
                evaluator=spec.evaluator,
                bind=spec.bind,
                survey=survey,
            )

        processes = planned(spec.communicator)
        is_free = spec.communicator == "auto" and not spec.ps and not attempt.hosts
        if is_free and len(processes) > 1:
            # Measurements are kept by the number of threads of a rank, which is known only now.
            best = step_settings.communicator(spec.command, processes[0].env, self._environ)
            if best in job_options.installed():
                processes = planned(best)
        for notice in ssh.compare(facts):
            screen.say(notice)
        return processes

    def _with_variables(self, processes: Sequence[Process], attempt: int) -> list[Process]:
        """Give each rank the variables of the job, and the settings that are fastest for it."""
        spec = self.spec
        variables = {
            # So a rank that crashes in C++ prints where in the script.
            "PYTHONFAULTHANDLER": os.environ.get("PYTHONFAULTHANDLER", "1"),
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

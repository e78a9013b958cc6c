"""A run of `dtk bench`: starts jobs, which take turns, and ends them.

    round 1   limit  none  1bit  ddp        a variant belongs to a job, all of whose ranks measure
    round 2   ddp  1bit  none  limit        at the same time, while other jobs wait
    ...

So whatever else the machine does falls on all variants alike.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar, cast

import click
import rich.console
import rich.progress

from dtk.bench import bench_jobs, report
from dtk.bench.bench_jobs import Baseline, BenchJob, JobLost, Places, command
from dtk.bench.results import BenchResults, Measured, Setting
from dtk.bench.worker import RankHost
from dtk.errors import DtkError
from dtk.launch import job_options

_T = TypeVar("_T")
_WORTH_SAYING = 0.5  # minutes


class RunProgress(rich.progress.Progress):
    """How far a run is: a bar on a terminal, else one line as soon as its length can be told."""

    def __init__(self) -> None:
        console = rich.console.Console(stderr=True)
        super().__init__(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._told = console.is_terminal  # where the bar tells
        self._began = time.monotonic()
        self._task = self.add_task("starting ...", total=None)

    def show(self, text: str, taken: int | None = None, planned: int | None = None) -> None:
        """Show what is going on, and how far it is."""
        self.update(self._task, description=text, completed=taken, total=planned)
        if not taken:
            self._began = time.monotonic()
        elif not self._told and planned and planned > taken:
            minutes = (time.monotonic() - self._began) / taken * (planned - taken) / 60
            self._told = True
            if minutes >= _WORTH_SAYING:
                click.echo(f"dtk bench: about {minutes:.1f} minutes more", err=True)


@dataclasses.dataclass
class BenchRun:
    """One run of `dtk bench`."""

    setting: Setting  # what to measure
    places: Places  # where
    # variables of a second limit, and of a second job for each of dtk's
    tuned: Mapping[str, str] = dataclasses.field(default_factory=dict)
    results: BenchResults = dataclasses.field(default_factory=BenchResults)  # what was found
    jobs: list[BenchJob] = dataclasses.field(default_factory=list)  # those that were started
    bar: RunProgress = dataclasses.field(default_factory=RunProgress)

    def measure(self, communicators: tuple[str, ...], peers: tuple[Baseline, ...]) -> int:
        """Measure everything, and leave no process behind; return the exit code."""

        def guarded() -> int:
            hurry = True
            try:
                with self.bar:
                    self._start_own(communicators)
                    for baseline in peers:
                        self._try_peer(baseline)
                    self._describe(communicators)
                    self.take_turns()
                hurry = False
                return 0
            except JobLost as lost:
                click.echo(f"dtk bench: {lost}", err=True)
                return lost.code
            finally:
                for job in self.jobs:
                    job.close(hurry=hurry)

        return job_options.interruptible(guarded, "bench", (one.job for one in self.jobs))

    # --- starting jobs ---

    def _start_own(self, communicators: tuple[str, ...]) -> None:
        limit = command("dtk.bench.variant:LimitWorker", self.setting)
        own = command("dtk.bench.variant:StrategyWorker", self.setting)
        for first, changed in (("", {}), (f"{report.TUNED} ", self.tuned))[: 1 + bool(self.tuned)]:
            if self.setting.models:
                self._start(f"{first}{report.BOUND}", "collective", limit, changed)
            for name in communicators:
                self._start(f"{first}{name}", name, own, changed)

    def _try_peer(self, baseline: Baseline) -> None:
        """Start a baseline, or note why not."""
        try:
            # Before anything is installed.
            if not baseline.trains and not self.setting.allreduce:
                raise JobLost("trains nothing; add for example --allreduce 100MB")
            if baseline.launcher == bench_jobs.MPI:
                bench_jobs.check_mpirun(self.places.hosts)
            python = sys.executable
            if baseline.python:
                self.bar.show(f"{baseline.name}: its environment ...")
                python = baseline.python(lambda text: click.echo(f"dtk bench: {text}", err=True))
            else:
                job_options.check_installed("horovod")
            argv = command(f"{baseline.worker}:Worker", self.setting, python)
            self._start(baseline.name, baseline.launcher, argv, {}, essential=False)
        except DtkError as error:
            self.results.absent[baseline.name] = str(error)

    def _start(
        self,
        name: str,
        launcher: str,
        argv: list[str],
        changed: Mapping[str, str],
        essential: bool = True,
    ) -> None:
        self.bar.show(f"{name}: starting ...")
        placed = bench_jobs.place(launcher, argv, self.places)
        processes = [one.with_env(changed) for one in placed]
        busy = launcher in bench_jobs.BUSY
        job = BenchJob(name, processes, self.places, essential=essential, busy=busy)
        self.jobs.append(job)
        try:
            job.start()
        except DtkError:
            if not essential:
                self.jobs.remove(job)
                job.close(hurry=True)
            raise

    def _describe(self, communicators: tuple[str, ...]) -> None:
        """Note what is measured, by whom, on what and with which versions."""
        # Each rank's place, and the versions that it measures; pickled by `dtk.bench.worker`.
        said = [cast(list[tuple[RankHost, dict[str, str]]], job.hello) for job in self.jobs]
        measured: dict[str, object] = {
            **dataclasses.asdict(self.setting),
            "communicators": communicators,
            "tuned": tuple(f"{name}={value}" for name, value in self.tuned.items()),
            "worlds": [job.name for job in self.jobs],
            "workers": self.places.workers,
            "ranks": [host for host, _ in said[0]],
            "versions": {name: of for hello in said for name, of in hello[0][1].items()},
        }
        self.results.setting = cast(Measured, measured)

    # --- taking turns ---

    def take_turns(self) -> None:
        """Measure all tasks by all jobs."""
        for task in self.setting.tasks:
            variants = self._build(task)
            for number in range(self.setting.rounds + 1):
                for job, name in order(variants, number):
                    # A job that is lost, and can be done without, takes no turns any more.
                    if label(job, name) in self.results.turns[task]:
                        self._measure(task, job, name, keep=number > 0)

    def _build(self, task: str) -> list[tuple[BenchJob, str]]:
        self.results.parameters[task], self.results.turns[task] = 0, {}
        variants = []
        for job in list(self.jobs):
            parameters, names, absent = self._asked(job, job.build, task) or (0, [], {})
            for name, why in absent.items():
                self.results.absent[f"{label(job, name)}, {task}"] = why
            # The first is the limit, which all others are compared with.
            expected = self.results.parameters[task] = self.results.parameters[task] or parameters
            if parameters == expected:
                variants += [(job, name) for name in names]
            elif names:
                why = f"its model has {parameters} parameters, expected {expected}"
                self.results.absent[f"{job.name}, {task}"] = why
        self.results.turns[task] = {label(*variant): [] for variant in variants}
        return variants

    def _measure(self, task: str, job: BenchJob, name: str, keep: bool) -> None:
        kept = self.results.turns[task]
        readings = self._asked(job, job.measure, name)
        if readings is None:
            # What is left of a round that has no end compares with nothing.
            for key in [key for key in kept if f"{key} ".startswith(f"{job.name} ")]:
                del kept[key]
        elif keep:
            kept[label(job, name)].append(readings)
        self.bar.show(*report.progress(self.results, len(self.setting.tasks)))

    def _asked(self, job: BenchJob, ask: Callable[[str], _T], what: str) -> _T | None:
        """Ask a job; return None where it is lost, and can be done without."""
        try:
            return ask(what)
        except JobLost as lost:
            if job.essential:
                raise
            self.results.absent[job.name] = str(lost)
            self.jobs.remove(job)
            job.close(hurry=True)
            return None


def order(variants: Sequence[_T], number: int) -> Iterator[_T]:
    """Return the order of one round: every other round begins at the other end.

    Example:
        >>> list(order("abc", 1)), list(order("abc", 2))
        (['a', 'b', 'c'], ['c', 'b', 'a'])
    """
    return iter(variants) if number % 2 else reversed(variants)


def label(job: BenchJob, name: str) -> str:
    """Return a variant's name in tables: that of its job, and its own.

    A job that measures one thing, which its name ends with, needs no second word.
    """
    return job.name if job.name.split()[-1] == name else f"{job.name} {name}"

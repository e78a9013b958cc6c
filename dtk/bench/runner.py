"""A run of `dtk bench`: starts worlds, lets them be measured, ends them."""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Mapping
from typing import cast

import click
import rich.console
import rich.progress

from dtk.bench import places, report
from dtk.bench.baselines import Baseline
from dtk.bench.measure import Benchmark, WorldLost
from dtk.bench.process_world import World, command
from dtk.bench.results import Measured, Results
from dtk.bench.setting import Setting
from dtk.cluster import Host
from dtk.errors import DtkError
from dtk.launch import job_options, machines

_PACKAGE = "dtk.bench"
_WORTH_SAYING = 0.5  # minutes


class Screen:
    """How far a run is: a bar on a terminal, else one line as soon as its length can be told."""

    def __init__(self) -> None:
        console = rich.console.Console(stderr=True)
        self._told = console.is_terminal  # where the bar tells
        self._began = time.monotonic()
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("starting ...", total=None)

    def __enter__(self) -> Screen:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """Show what is going on."""
        self._bar.update(self._task, description=text)

    def show(self, text: str, taken: int, planned: int) -> None:
        """Show how far it is."""
        self._bar.update(self._task, description=text, completed=taken, total=planned)
        if not taken:
            self._began = time.monotonic()
        elif not self._told and planned > taken:
            minutes = (time.monotonic() - self._began) / taken * (planned - taken) / 60
            self._told = True
            if minutes >= _WORTH_SAYING:
                click.echo(f"dtk bench: about {minutes:.1f} minutes more", err=True)


@dataclasses.dataclass
class Run:
    """One run of `dtk bench`."""

    setting: Setting  # what to measure
    workers: int  # on how many
    hosts: tuple[Host, ...] = ()  # where; this machine when empty
    remote_shell: str = machines.DEFAULT_REMOTE_SHELL  # reaches them
    # variables of a second limit, and of a second world for each of dtk's
    tuned: Mapping[str, str] = dataclasses.field(default_factory=dict)
    results: Results = dataclasses.field(default_factory=Results)  # what was found
    worlds: list[World] = dataclasses.field(default_factory=list)  # those that were started
    say: Callable[[str], None] = lambda text: None  # told how far it is

    def measure(self, communicators: tuple[str, ...], peers: tuple[Baseline, ...]) -> int:
        """Measure everything."""
        return job_options.interruptible(
            functools.partial(self._guarded, communicators, peers),
            "bench",
            (world.job for world in self.worlds),
        )

    def _guarded(self, communicators: tuple[str, ...], peers: tuple[Baseline, ...]) -> int:
        """Measure, and leave no process behind."""
        hurry = True
        try:
            with Screen() as screen:
                self.say = screen.say
                self._start_own(communicators)
                for baseline in peers:
                    self._try_peer(baseline)
                self._describe(communicators)
                self._take_turns(screen)
            hurry = False
        except WorldLost as lost:
            click.echo(f"dtk bench: {lost}", err=True)
            return lost.code
        finally:
            for world in self.worlds:
                world.close(hurry)
        return 0

    def _start_own(self, communicators: tuple[str, ...]) -> None:
        for first, changed in (("", {}), (f"{report.TUNED} ", self.tuned))[: 1 + bool(self.tuned)]:
            if self.setting.models:
                limit = self._command("no_communication_worker")
                self._start(f"{first}{report.BOUND}", "collective", limit, changed=changed)
            for name in communicators:
                own, busy = self._command("strategy_worker"), name in places.BUSY
                self._start(f"{first}{name}", name, own, busy=busy, changed=changed)

    def _take_turns(self, screen: Screen) -> None:
        def say() -> None:
            taken, planned = report.amount(self.results, len(self.setting.tasks))
            screen.show(report.progress(self.results), taken, planned)

        Benchmark(self.setting, list(self.worlds), self.results, say).run()

    def _command(self, module: str) -> list[str]:
        return command(f"{_PACKAGE}.{module}", dataclasses.asdict(self.setting))

    def _try_peer(self, baseline: Baseline) -> None:
        """Start a baseline, or note why not."""
        try:
            self._check(baseline)
            self.say(f"{baseline.name}: its environment ...")
            python = sys.executable
            if baseline.environment is not None:
                python = baseline.environment.python(
                    lambda text: click.echo(f"dtk bench: {text}", err=True)
                )
            argv = command(str(baseline.worker), dataclasses.asdict(self.setting), python)
            self._start(baseline.name, baseline.launcher, argv, essential=False, busy=baseline.busy)
        except DtkError as error:
            self.results.absent[baseline.name] = str(error)

    def _check(self, baseline: Baseline) -> None:
        """Raise the reason why a baseline cannot be measured, before anything is installed."""
        if not baseline.trains and not self.setting.allreduce:
            raise WorldLost("trains nothing; add for example --allreduce 100MB")
        if baseline.launcher == places.MPI:
            places.check_mpirun(self.hosts)
        if baseline.environment is None:
            job_options.check_installed("horovod")

    def _start(
        self,
        name: str,
        launcher: str,
        argv: list[str],
        *,
        essential: bool = True,
        busy: bool = False,
        changed: Mapping[str, str] | None = None,
    ) -> None:
        # Each host is surveyed by the interpreter that will run there: one that has none is named.
        survey = functools.partial(machines.survey, remote_shell=self.remote_shell, python=argv[0])
        self.say(f"{name}: starting ...")
        processes = [
            dataclasses.replace(one, env={**one.env, **(changed or {})})
            for one in places.place(launcher, argv, self.workers, self.hosts, survey)
        ]
        world = World(
            name,
            processes,
            self.workers,
            essential=essential,
            busy=busy,
            remote_shell=self.remote_shell,
        )
        self.worlds.append(world)
        try:
            world.start()
        except DtkError:
            if not essential:
                self.worlds.remove(world)
                world.close(hurry=True)
            raise

    def _describe(self, communicators: tuple[str, ...]) -> None:
        """Note what is measured, by whom, on what and with which versions."""
        first, *_ = self.worlds
        versions: dict[str, str] = {}
        for world in self.worlds:
            versions |= world.hello[0]["versions"]
        self.results.setting = {
            **cast(Measured, dataclasses.asdict(self.setting)),  # asdict types no field
            "communicators": communicators,
            "tuned": tuple(f"{name}={value}" for name, value in self.tuned.items()),
            "worlds": [world.name for world in self.worlds],
            "workers": self.workers,
            "ranks": [
                {"host": one["host"], "cores": one["cores"], "threads": one["threads"]}
                for one in first.hello
            ],
            "versions": versions,
        }

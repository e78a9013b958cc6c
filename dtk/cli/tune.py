"""`dtk tune`: find the TensorFlow settings with which a script's step is fastest here.

Each way of setting them is measured in a job of its own. Ways take turns, in rounds, so that
whatever else the machine does falls on all alike.

    round 1   as it comes   oneDNN on   oneDNN off   XLA   over collective ...
    round 2   ...
    then      what won, together, where several did
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import io
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import click
import rich.console
import rich.table

from dtk.cli.run import command_of
from dtk.cluster import variables as names
from dtk.cluster.variables import COMMUNICATOR, STEP_SETTINGS, TIME_STEPS
from dtk.errors import ClusterError
from dtk.launch import assign, job_options, step_settings
from dtk.launch.job_run import JobRun
from dtk.launch.plan import JobSpec
from dtk.launch.step_settings import StepSettings

AS_IT_COMES = "as it comes"
# A setting is kept if each round is faster by this much with it: less may be the next run's noise.
_GAIN = 0.95
_ONEDNN, _PAGES, _INTER = "TF_ENABLE_ONEDNN_OPTS", "GLIBC_TUNABLES", "TF_NUM_INTEROP_THREADS"

Variables = Mapping[str, str]


@click.command(
    cls=job_options.JobCommand,
    context_settings={"allow_interspersed_args": False, "show_default": True},
    epilog="""
    \b
    dtk tune train.py --batch-size 256
    dtk tune --forget train.py
    """,
)
@click.option("-n", "--workers", type=int, default=2, help="Processes to start.")
@job_options.communicator
@job_options.stall_timeout
@click.option("--rounds", type=click.IntRange(1), default=2, help="Measurements per setting.")
@click.option("--forget", is_flag=True, help="Use TensorFlow's own settings again.")
@click.option("-m", "module", is_flag=True, help="SCRIPT is a module, as in `python -m`.")
@click.argument("script", required=False, type=click.Path())
@click.argument("args", nargs=-1, type=click.Path())
def tune(
    workers: int,
    communicator: str,
    stall_timeout: float,
    rounds: int,
    forget: bool,
    module: bool,
    script: str | None,
    args: tuple[str, ...],
) -> None:
    """Find the settings with which a step of SCRIPT is fastest on this machine, and keep them.

    SCRIPT is started once for each setting of TensorFlow, in turns, up to the first step of its
    first fit. That step is timed on its first batch over all processes; then the script ends. The
    settings are oneDNN, XLA, fused batch normalization and Adam, the size of pages, threads between
    operations, and communicators; a variable that you have set does not change. `dtk run` then uses
    settings that were faster by more than 5 % each time, and prints them; it uses the communicator
    on one machine only.

    Other kernels may round differently: weights then equal those of one process with the same
    settings.
    """
    command = command_of(script, module, args)
    if workers < 2:
        raise ClusterError(f"-n {workers}: steps of one process alone are not timed; use -n 2")
    job_options.check_installed(communicator)

    spec = JobSpec(
        command=command, workers=workers, communicator=communicator, stall_timeout=stall_timeout
    )
    threads = assign(command, workers, communicator=communicator)[0].env["OMP_NUM_THREADS"]
    others = job_options.installed()[1:] if communicator == "auto" else []
    file = step_settings.file_of(command, threads)
    if forget:
        known = file.exists()
        file.unlink(missing_ok=True)
        click.echo("forgotten" if known else "there was nothing to forget")
        return
    with rich.console.Console(stderr=True).status("starting ...") as status:
        tuning = Tuning(
            ways(int(threads), os.environ, others),
            functools.partial(measure, spec),
            lambda name: status.update(f"measuring: {name}"),
            rounds,
        )
        code = job_options.interruptible(lambda: _choose(tuning, file), "tune", ())
    if code:
        sys.exit(code)


def _choose(tuning: Tuning, file: Path) -> int:
    best = tuning.choose()
    table = rich.table.Table("", "ms per step (least - most)", box=None, pad_edge=False)
    for name, times in tuning.times.items():
        middle = statistics.median(times)
        table.add_row(name, f"{middle:.1f} ({min(times):.1f} - {max(times):.1f})")
    for name in tuning.failed:
        table.add_row(name, "the script fails with it")
    rich.console.Console(width=100).print(table)
    step_settings.save(file, best)
    if best.variables:
        click.echo(
            f"kept: {step_settings.written(best.variables)}; `dtk run` sets it for this script, "
            f"{best.milliseconds:.1f} ms a step instead of {best.milliseconds_before:.1f}"
        )
    else:
        click.echo("nothing is faster by 5 %: TensorFlow's own settings stay")
    return 0


class TuneError(ClusterError):
    """The script could not be measured; says why."""


@dataclasses.dataclass(frozen=True)
class Timing:
    """What a job has measured."""

    milliseconds: float  # of a step, median of some, of the slowest rank
    model: str  # describes the model and the batch
    deterministic: bool  # whether the script has turned op determinism on
    idle: Sequence[str] = ()  # variables that change nothing for this model


def ways(
    threads: int, environ: Variables, communicators: Sequence[str] = ()
) -> dict[str, dict[str, str]]:
    """Return what is tried, by name: the variables that are set."""
    tried = {
        AS_IT_COMES: {},
        "oneDNN on": {_ONEDNN: "1"},
        "oneDNN off": {_ONEDNN: "0"},
        "XLA": {names.JIT_COMPILE: "1"},
        "Keras's batch norm": {names.FUSED_BATCH_NORM: "0"},
        "small pages": {_PAGES: "glibc.malloc.hugetlb=0"},
        "one more thread between operations": {_INTER: str(threads + 1)},
        **{f"over {name}": {COMMUNICATOR: name} for name in communicators},
    }
    return {name: new for name, new in tried.items() if not new.keys() & environ.keys()}


def measure(spec: JobSpec, variables: Variables) -> Timing:
    """Measure the script's step with some settings."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "steps.json")
        env = {**variables, TIME_STEPS: str(file), STEP_SETTINGS: "0"}
        communicator = env.pop(COMMUNICATOR, spec.communicator)
        said = io.StringIO()
        asked = dataclasses.replace(spec, communicator=communicator, variables=env)
        if code := JobRun(asked, stdout=io.StringIO(), stderr=said).wait():
            raise TuneError(f"the script ended with exit code {code}:\n{said.getvalue().rstrip()}")
        if not file.exists():  # with a strategy a rank says so itself
            raise TuneError("the script ended without making a strategy")
        return Timing(**json.loads(file.read_text()))


@dataclasses.dataclass
class Tuning:
    """Measurements of one script."""

    ways: dict[str, dict[str, str]]
    measure: Callable[[Variables], Timing]
    say: Callable[[str], None]
    rounds: int = 2
    # of a step, by way and round, in milliseconds
    times: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    # ways in which the script fails, and how; XLA cannot compile every step
    failed: dict[str, str] = dataclasses.field(default_factory=dict)

    def choose(self) -> StepSettings:
        """Measure every way, and return the settings to keep."""
        first = self._take(AS_IT_COMES)
        if first.deterministic:
            raise TuneError(
                "the script turns op determinism on: what is measured must not decide how it "
                "computes, so nothing was chosen"
            )
        idle = set(first.idle)
        self.ways = {name: way for name, way in self.ways.items() if not way or way.keys() - idle}
        for number in range(self.rounds):
            for name in self.ways:
                if number or name != AS_IT_COMES:
                    self._try(name)
        won = self._winners()
        best = next(iter(won), AS_IT_COMES)
        if len(won) > 1:
            together = " and ".join(won)
            self.ways[together] = dict(collections.ChainMap(*(self.ways[name] for name in won)))
            for _ in range(self.rounds):
                self._try(together)
            if together not in self.failed and self._typical(together) < self._typical(best):
                best = together
        before = self._typical(AS_IT_COMES)
        return StepSettings(self.ways[best], first.model, self._typical(best), before)

    def _try(self, name: str) -> None:
        try:
            if name not in self.failed:
                self._take(name)
        except TuneError as error:
            if name == AS_IT_COMES:
                raise
            self.failed[name] = str(error)
            self.times.pop(name, None)

    def _take(self, name: str) -> Timing:
        self.say(name)
        timing = self.measure(self.ways[name])
        self.times.setdefault(name, []).append(timing.milliseconds)
        return timing

    def _typical(self, name: str) -> float:
        return statistics.median(self.times[name])

    def _winners(self) -> list[str]:
        """Return ways that were faster in each round, the fastest first, one for each variable."""
        usual = self.times[AS_IT_COMES]
        won = [
            name
            for name, times in self.times.items()
            if all(this < _GAIN * that for this, that in zip(times, usual, strict=True))
        ]
        kept: list[str] = []
        for name in sorted(won, key=self._typical):
            if not any(self.ways[name].keys() & self.ways[other].keys() for other in kept):
                kept.append(name)
        return kept

"""The settings of TensorFlow with which `dtk tune` has measured a script's fastest step.

They are environment variables that TensorFlow reads while it is imported, so the launcher sets
them. Other kernels may round differently. All ranks get the same settings, and their weights equal
those of one process with these settings.

Each way of setting them is measured in a job of its own. Ways take turns, in rounds, so that
whatever else the machine does falls on all alike.

    round 1   as it comes   oneDNN on   oneDNN off   XLA   over collective ...
    round 2   ...
    then      what won, together, where several did
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dtk import cache
from dtk.cluster import environment
from dtk.cluster.variables import (
    COMMUNICATOR,
    FUSED_ADAM,
    FUSED_BATCH_NORM,
    JIT_COMPILE,
    STEP_SETTINGS,
    TIME_STEPS,
)
from dtk.errors import ClusterError
from dtk.launch import agent
from dtk.launch.job import Job
from dtk.launch.plan import Process

_FORMAT = 1
AS_IT_COMES = "as it comes"
# A setting is kept if each round is faster by this much with it: less may be the next run's noise.
_GAIN = 0.95
_ONEDNN, _PAGES, _INTER = "TF_ENABLE_ONEDNN_OPTS", "GLIBC_TUNABLES", "TF_NUM_INTEROP_THREADS"

Variables = Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class StepSettings:
    """What was found best for a script on this kind of machine."""

    # environment variables to set; none where TensorFlow's own choice is best
    variables: Mapping[str, str]
    model: str  # describes the model and batch they were measured with
    milliseconds: float  # of a step with them
    milliseconds_before: float  # of a step without


def file_of(command: Sequence[str], threads: str) -> Path:
    """Return where the settings of a script are kept."""
    words = list(command[1:])
    name = " ".join(words[:2]) if words[0] == "-m" else str(Path(words[0]).resolve())
    version = agent.versions().get("tensorflow", "unknown")
    told = [name, platform.machine(), environment.instructions(), threads, version]
    key = hashlib.blake2b(json.dumps(told).encode(), digest_size=12).hexdigest()
    return cache.folder() / "step-settings" / f"{key}.json"


def save(file: Path, found: StepSettings) -> None:
    """Keep settings."""
    with cache.replacing(file) as draft:
        draft.write_text(json.dumps({"format": _FORMAT, **dataclasses.asdict(found)}, indent=1))


def read(file: Path) -> StepSettings | None:
    """Return what was kept."""
    try:
        found = json.loads(file.read_text())
        if found.pop("format") != _FORMAT:
            return None
        return StepSettings(**found)
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return None  # as good as none: `dtk tune` makes it again


def _kept(command: Sequence[str], env: Mapping[str, str]) -> StepSettings | None:
    try:
        return read(file_of(command, env.get("OMP_NUM_THREADS", "")))
    except RuntimeError:  # a user without a home has no cache
        return None


def apply(
    command: Sequence[str], env: Mapping[str, str], environ: Mapping[str, str] = os.environ
) -> tuple[dict[str, str], StepSettings | None]:
    """Add the settings of a script to the variables of a rank."""
    if environ.get(STEP_SETTINGS) == "0" or TIME_STEPS in environ:
        return dict(env), None
    if (found := _kept(command, env)) is None:
        return dict(env), None
    used = {name: value for name, value in found.variables.items() if name not in environ}
    if used.get(COMMUNICATOR) != env.get(COMMUNICATOR):
        used.pop(COMMUNICATOR, None)  # another was asked for, or there are other hosts
    if not used:
        return dict(env), None
    settings = dataclasses.replace(found, variables=used)
    return {**env, **used, STEP_SETTINGS: found.model}, settings


def communicator(
    command: Sequence[str], env: Mapping[str, str], environ: Mapping[str, str] = os.environ
) -> str | None:
    """Return the communicator that was found fastest between processes of one machine, if any."""
    if COMMUNICATOR in environ or environ.get(STEP_SETTINGS) == "0":
        return None
    found = _kept(command, env)
    return None if found is None else found.variables.get(COMMUNICATOR)


def written(variables: Mapping[str, str]) -> str:
    """Write settings as a shell would take them."""
    return " ".join(f"{name}={value}" for name, value in variables.items())


# Measuring them: see `dtk tune`.


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
        "XLA": {JIT_COMPILE: "1"},
        "fused batch norm": {FUSED_BATCH_NORM: "1"},
        "fused Adam": {FUSED_ADAM: "1"},
        "small pages": {_PAGES: "glibc.malloc.hugetlb=0"},
        "one more thread between operations": {_INTER: str(threads + 1)},
        **{f"over {name}": {COMMUNICATOR: name} for name in communicators},
    }
    return {name: new for name, new in tried.items() if not new.keys() & environ.keys()}


def measure(planned: Callable[[str | None], Sequence[Process]], variables: Variables) -> Timing:
    """Measure the script's step with some settings."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "steps.json")
        given = {**variables, TIME_STEPS: str(file), STEP_SETTINGS: "0"}
        communicator = given.pop(COMMUNICATOR, None)
        said = io.StringIO()
        processes = [
            dataclasses.replace(one, env={**one.env, **given}) for one in planned(communicator)
        ]
        with Job(processes, stdout=io.StringIO(), stderr=said) as job:
            code = job.wait()
        if code:
            raise TuneError(f"the script ended with exit code {code}:\n{said.getvalue().rstrip()}")
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
        for name, variables in list(self.ways.items()):
            if variables and variables.keys() <= set(first.idle):
                del self.ways[name]
        for number in range(self.rounds):
            for name in self.ways:
                if (number or name != AS_IT_COMES) and name not in self.failed:
                    self._try(name)
        won = self._winners()
        chosen = won[:1]
        if len(won) > 1:
            together = " and ".join(won)
            self.ways[together] = {
                k: v for name in reversed(won) for k, v in self.ways[name].items()
            }
            for _ in range(self.rounds):
                if together not in self.failed:
                    self._try(together)
            if together not in self.failed and self._typical(together) < self._typical(won[0]):
                chosen = [together]
        best = chosen[0] if chosen else AS_IT_COMES
        before = self._typical(AS_IT_COMES)
        return StepSettings(self.ways[best], first.model, self._typical(best), before)

    def _try(self, name: str) -> None:
        try:
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

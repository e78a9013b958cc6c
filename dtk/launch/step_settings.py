"""The settings of TensorFlow with which `dtk tune` has measured a script's fastest step.

They are environment variables that TensorFlow reads while it is imported, so the launcher sets
them. Other kernels may round differently. All ranks get the same settings, and their weights equal
those of one process with these settings.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

from dtk.cache import folder, replacing
from dtk.cluster import place
from dtk.cluster.variables import COMMUNICATOR, STEP_SETTINGS, TIME_STEPS
from dtk.launch import agent

_FORMAT = 2


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
    told = [name, platform.machine(), place.instructions(), threads, version]
    key = hashlib.blake2b(json.dumps(told).encode(), digest_size=12).hexdigest()
    return folder() / "step-settings" / f"{key}.json"


def save(file: Path, settings: StepSettings) -> None:
    """Keep settings."""
    with replacing(file) as draft:
        draft.write_text(json.dumps({"format": _FORMAT, **dataclasses.asdict(settings)}, indent=1))


def _kept(command: Sequence[str], env: Mapping[str, str]) -> StepSettings | None:
    """Return what was kept for a script."""
    try:
        fields = json.loads(file_of(command, env.get("OMP_NUM_THREADS", "")).read_text())
        return StepSettings(**fields) if fields.pop("format") == _FORMAT else None
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RuntimeError):
        return None  # as good as none: `dtk tune` makes it again; a user may have no home


def apply(
    command: Sequence[str], env: Mapping[str, str], environ: Mapping[str, str] = os.environ
) -> tuple[dict[str, str], StepSettings | None]:
    """Add the settings of a script to the variables of a rank."""
    is_off = environ.get(STEP_SETTINGS) == "0" or TIME_STEPS in environ
    if is_off or (kept := _kept(command, env)) is None:
        return dict(env), None
    used = {name: value for name, value in kept.variables.items() if name not in environ}
    if used.get(COMMUNICATOR) != env.get(COMMUNICATOR):
        used.pop(COMMUNICATOR, None)  # another was asked for, or there are other hosts
    if not used:
        return dict(env), None
    settings = dataclasses.replace(kept, variables=used)
    return {**env, **used, STEP_SETTINGS: kept.model}, settings


def communicator(
    command: Sequence[str], env: Mapping[str, str], environ: Mapping[str, str] = os.environ
) -> str | None:
    """Return the communicator that was found fastest between processes of one machine, if any."""
    if COMMUNICATOR in environ or environ.get(STEP_SETTINGS) == "0":
        return None
    settings = _kept(command, env)
    return None if settings is None else settings.variables.get(COMMUNICATOR)


def written(variables: Mapping[str, str]) -> str:
    """Write settings as a shell would take them."""
    return " ".join(f"{name}={value}" for name, value in variables.items())

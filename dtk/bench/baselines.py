"""Libraries that dtk is measured against: what `dtk bench` knows of each, and where they are.

They are part of dtk's repository, and of no installed package:

    benchmarks/baselines/registry.py     BASELINES, a `Baseline` for each name of --peer
    benchmarks/baselines/torch_ddp.py    a `dtk.bench.worker.Worker`, run in its own environment
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from dtk.bench.setting import BenchError, check_names

FOLDER = Path(__file__).parents[2] / "benchmarks" / "baselines"


class Environment(Protocol):
    """Packages that a baseline needs, beside those of this Python."""

    def python(self, say: Callable[[str], None]) -> str:
        """Return the interpreter of the environment, which is made where there is none."""


@dataclasses.dataclass(frozen=True)
class Baseline:
    """Another library that trains on several processes."""

    name: str  # as given with --peer
    about: str  # what it is, for the help
    worker: Path  # file with its `dtk.bench.worker.Worker`, which may import what is beside it
    launcher: str  # "collective", "horovod" or "horovod-mpi", see `dtk.bench.places`
    # where it runs; None for this Python's own, which Horovod is built for
    environment: Environment | None = None
    trains: bool = True  # whether it does; or else it measures sizes alone
    busy: bool = False  # whether it computes while nothing is asked of it


def find(folder: Path = FOLDER) -> Mapping[str, Baseline]:
    """Return the baselines of the repository that dtk is in, by name."""
    file = folder / "registry.py"
    spec = importlib.util.spec_from_file_location("dtk_baselines", file)
    if not file.exists() or spec is None or spec.loader is None:
        return {}
    registry = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(registry)
    return {baseline.name: baseline for baseline in registry.BASELINES}


def choose(names: Sequence[str], known: Mapping[str, Baseline]) -> tuple[Baseline, ...]:
    """Return the baselines of these names.

    Example:
        >>> choose(["torch"], find())[0].about
        "PyTorch's DistributedDataParallel over Gloo"
    """
    for name in names:
        if not known:
            raise BenchError(
                f"--peer {name}: other frameworks are measured from a clone of dtk's repository, "
                f"and the dtk in {Path(__file__).parents[1]} is installed without; run `pip "
                f"install -e '.[bench]'` in a clone, then `dtk bench --peer {name}` again"
            )
    check_names("--peer", names, known)
    return tuple(known[name] for name in names)

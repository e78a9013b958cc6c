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
        """Return the interpreter of the environment, which is made where there is none.

        Args:
            say: Told what will be done, before it is.

        Returns:
            Its path.

        Raises:
            WorldLost: It cannot be made; says why, and what to do.
        """


@dataclasses.dataclass(frozen=True)
class Baseline:
    """Another library that trains on several processes.

    Attributes:
        name: As given with --peer.
        about: What it is, for the help.
        worker: File with its `dtk.bench.worker.Worker`, which may import what is beside it.
        launcher: "collective", "horovod" or "horovod-mpi", see `dtk.bench.places`.
        environment: Where it runs; None for this Python's own, which Horovod is built for.
        trains: Whether it does; or else it measures sizes alone.
        busy: Whether it computes while nothing is asked of it.
    """

    name: str
    about: str
    worker: Path
    launcher: str
    environment: Environment | None = None
    trains: bool = True
    busy: bool = False


def find(folder: Path = FOLDER) -> Mapping[str, Baseline]:
    """Return the baselines of the repository that dtk is in, by name.

    Args:
        folder: Where `registry.py` is.

    Returns:
        None of them where dtk is installed without its repository.
    """
    file = folder / "registry.py"
    spec = importlib.util.spec_from_file_location("dtk_baselines", file)
    if not file.exists() or spec is None or spec.loader is None:
        return {}
    registry = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(registry)
    return {baseline.name: baseline for baseline in registry.BASELINES}


def choose(names: Sequence[str], known: Mapping[str, Baseline]) -> tuple[Baseline, ...]:
    """Return the baselines of these names.

    Args:
        names: As given with --peer.
        known: What `find` returned.

    Raises:
        BenchError: There is no such baseline; or none at all, and where they are.

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

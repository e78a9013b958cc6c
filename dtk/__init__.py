"""Distributed training for Keras 3 on TensorFlow.

    strategy = dtk.auto_strategy()
    with strategy.scope():
        model.compile(...)
    model.fit(...)

Importing dtk costs next to nothing; TensorFlow is loaded by the first part that needs it. The
import changes nothing in a process except defaults of environment variables, and a job of several
processes that makes no strategy gets a warning at its end. Ranks of `dtk run` begin with code of
the launcher's, which also makes the imports of TensorFlow and Keras faster and quieter, refuses to
train before a strategy is made, and begins to report the progress of the process.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import TYPE_CHECKING

from dtk.trainer import undistributed_jobs
from dtk.version import __version__

if TYPE_CHECKING:
    from dtk import (
        callbacks,
        cluster,
        communicators,
        data,
        exchange,
        inference,
        launch,
        layers,
        migrate,
        optimizers,
        schedules,
        search,
        strategies,
    )
    from dtk.launch.notebook import notebook_launcher
    from dtk.strategies.auto_strategy import auto_strategy

__all__ = [
    "__version__",
    "auto_strategy",
    "callbacks",
    "cluster",
    "communicators",
    "data",
    "exchange",
    "inference",
    "launch",
    "layers",
    "migrate",
    "notebook_launcher",
    "optimizers",
    "schedules",
    "search",
    "strategies",
]

# The names above that are not of a room, and where they are.
_HOMES = {"auto_strategy": "strategies", "notebook_launcher": "launch.notebook"}

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
if os.environ.get("OPAL_PREFIX"):  # an mpirun that brought its own MPI: Horovod may not load
    from dtk import importing
    from dtk.cluster import mpi_installs

    if mpi_installs.mpirun_of_python_started(os.environ):
        importing.inside("horovod.tensorflow.mpi_ops", mpi_installs.horovod_import)
undistributed_jobs.watch()


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(f"dtk.{_HOMES[name]}"), name)
    if name in __all__:
        return importlib.import_module(f"dtk.{name}")
    hint = ""
    if name[:1].isupper():  # no dunder that a tool probes for
        rooms = [f"dtk.{one}" for one in __all__ if importlib.util.find_spec(f"dtk.{one}")]
        homes = [room for room in rooms if name in importlib.import_module(room).__all__]
        hint = f"; it is {homes[0]}.{name}" if homes else ""
    raise AttributeError(f"module 'dtk' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted(__all__)

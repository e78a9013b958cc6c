"""Hyperparameter search with Optuna: trials that all ranks run together.

Rank 0 owns the study; every rank runs the same objective, with the same parameters.
"""
# ruff: noqa: F401 - type checkers see the names by these imports, scripts by `__getattr__`

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

from dtk.version import pip_install

if TYPE_CHECKING:
    from dtk.search.distributed_trial import DistributedTrial, PruningCallback
    from dtk.search.rounds import RankError
    from dtk.search.study import optimize

_HOMES = {
    "DistributedTrial": "distributed_trial",
    "PruningCallback": "distributed_trial",
    "RankError": "rounds",
    "optimize": "study",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name in _HOMES:
        if importlib.util.find_spec("optuna") is None:
            raise ModuleNotFoundError(
                f"dtk.search.{name} needs Optuna, which is not installed; run "
                f"`{pip_install('search')}`",
                name="optuna",
            )
        return getattr(importlib.import_module(f"dtk.search.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'dtk.search' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

"""Notices a job whose processes each train by themselves.

Started under `mpirun -np 4`, a script that imports dtk and Keras but makes no strategy runs four
times and reports success four times. This says so when the process ends.
"""

from __future__ import annotations

import atexit
import sys

from dtk.cluster.detect import detect


def watch() -> None:
    """From now on, warn at exit unless `made_strategy` is called before."""
    atexit.register(_warn)


def made_strategy() -> None:
    """A strategy joins the processes: nothing to warn about."""
    atexit.unregister(_warn)


def _warn() -> None:
    # An exception that ended the script says more.
    if "keras" not in sys.modules or hasattr(sys, "last_value"):
        return
    environment = detect()
    if environment.size > 1 and environment.role in ("worker", "chief"):
        print(
            f"dtk: rank {environment.rank}: this script made no strategy, so each of the "
            f"{environment.size} processes worked by itself ({environment.reason}); add "
            "`strategy = dtk.auto_strategy()` and compile the model inside strategy.scope()",
            file=sys.stderr,
        )

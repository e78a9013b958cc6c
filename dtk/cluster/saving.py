"""The seconds that ranks have for saving when a job is ended; ranks and `dtk run` know them.

A rank that would save on SIGTERM tells the launcher so, by `dtk.cluster.report_channel`:

    ready    a SIGTERM would be followed by a checkpoint, when the running step is over
    begun    all ranks have agreed, and one writes
    over     nothing would be saved any more

The launcher sends SIGTERM to ranks that are ready, gives them the grace to begin, and as much again
to write. All others it ends as before.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping
from typing import Literal, TypeAlias

from dtk.cluster import report_channel
from dtk.cluster.variables import SAVE_GRACE
from dtk.errors import ClusterError

DEFAULT_GRACE = 60.0

Readiness: TypeAlias = Literal["ready", "begun", "over"]


def grace(environ: Mapping[str, str] = os.environ) -> float:
    """Return how long ranks may take to agree on a checkpoint, and to write it."""
    text = environ.get(SAVE_GRACE, "")
    if not text:
        return DEFAULT_GRACE
    with contextlib.suppress(ValueError):
        seconds = float(text)
        if math.isfinite(seconds) and seconds > 0:
            return seconds
    raise ClusterError(f"{SAVE_GRACE}={text!r}, expected a positive number of seconds")


def is_launcher_told() -> bool:
    """Return whether a launcher reads what `tell` writes."""
    return os.environ.get("DTK_RUN") == "1" and SAVE_GRACE in os.environ


def tell(what: Readiness) -> None:
    """Tell the launcher, if there is one, what a SIGTERM would lead to."""
    if is_launcher_told():
        report_channel.tell({"saving": what})

"""Notice a job whose processes each train by themselves.

Started under `mpirun -np 4`, a script that makes no strategy trains four times and reports success
four times. Under `dtk run`, training before a strategy is made is refused; elsewhere, and where a
script does not train, every process says so when it ends.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dtk.cluster.detect import detect
from dtk.errors import NotDistributedError, at_rank
from dtk.nests import Args, Function, Kwargs

if TYPE_CHECKING:
    import keras

# Whether the script has said how its processes belong together.
_decided = threading.Event()


def watch() -> None:
    """Warn at the end of a job of several processes unless `made_strategy` is called before."""
    atexit.register(_warn)


def made_strategy() -> None:
    """Note that a strategy joins the processes, or that they are to work alone."""
    _decided.set()
    atexit.unregister(_warn)


@contextlib.contextmanager
def training_refused() -> Iterator[None]:
    """Return a context to import Keras in, whose `fit` is refused until a strategy is made.

    Only in a job of several processes. Processes that dtk's strategies have joined replace what
    refuses here.
    """
    yield
    # Else it is a file of the script's that has this name; strategies say so.
    if hasattr(sys.modules["keras"], "Model") and _trains_with_others():
        from dtk.trainer import trainer_calls

        trainer_calls.through(_refuse)


def _trains_with_others() -> bool:
    environment = detect()
    return environment.size > 1 and environment.role in ("worker", "chief")


def _refuse(
    model: keras.Model, name: str, method: Function[object], args: Args, kwargs: Kwargs
) -> object:
    if name in ("fit", "train_on_batch") and not _decided.is_set():
        environment = detect()
        raise NotDistributedError(
            at_rank(
                environment.rank,
                f"{name} of model {model.name!r} before any strategy was made, in a job of "
                f"{environment.size} processes ({environment.reason}): each would train a model of "
                "its own. Make `strategy = dtk.auto_strategy()` first, and compile the model "
                "inside strategy.scope()",
            )
        )
    return method(*args, **kwargs)


def _warn() -> None:
    # An exception that ended the script says more.
    if "keras" not in sys.modules or hasattr(sys, "last_value"):
        return
    environment = detect()
    if _trains_with_others():
        print(
            f"dtk: rank {environment.rank}: this script made no strategy, so each of the "
            f"{environment.size} processes worked by itself ({environment.reason}); add "
            "`strategy = dtk.auto_strategy()` and compile the model inside strategy.scope()",
            file=sys.stderr,
        )

"""Notice a job whose processes each train by themselves.

Under `mpirun -np 4`, a script without a strategy trains four times and reports success four times.
Under `dtk run`, `fit` without a strategy is refused; elsewhere, and if the script does not train
so, every process that imported dtk prints a warning when it ends.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dtk.cluster.detect import detect
from dtk.errors import ClusterError, NotDistributedError, at_rank
from dtk.nests import Function
from dtk.patches import definer, patch_for_good

if TYPE_CHECKING:
    import keras

# Set once the script has made a strategy, or has said that its processes work alone.
_decided = threading.Event()


def watch() -> None:
    """In a job of several processes, warn at its end unless `made_strategy` was called."""
    atexit.register(_warn)


def made_strategy() -> None:
    """Note that a strategy joins the processes, or that they work alone on purpose."""
    _decided.set()
    atexit.unregister(_warn)


@contextlib.contextmanager
def training_refused() -> Iterator[None]:
    """Return a context for importing Keras; then `fit` is refused until a strategy is made.

    This concerns jobs of several processes only. dtk's strategies replace this patch.
    """
    yield
    keras = sys.modules["keras"]
    # Without Model, a file of the script has this name; strategies report that.
    if hasattr(keras, "Model") and _trains_with_others():
        for name in ("fit", "train_on_batch"):
            patch_for_good(definer(keras.Model, name), name, _refuse)


def _trains_with_others() -> bool:
    place = detect()
    return place.size > 1 and place.role in ("worker", "chief")


def _refuse(
    model: keras.Model, *args: object, original: Function[object], **kwargs: object
) -> object:
    if _decided.is_set():
        return original(model, *args, **kwargs)
    place = detect()
    message = (
        f"{original.__name__} of model {model.name!r} before any strategy was made, in a job of "
        f"{place.size} processes ({place.reason}): each would train a model of "
        "its own. Make `strategy = dtk.auto_strategy()` first, and compile the model inside "
        "strategy.scope(); `dtk migrate` does so in scripts for Horovod and tf.distribute. To "
        f"train alone in each process, call {original.__name__} inside "
        "`with dtk.strategies.undistributed():`"
    )
    raise NotDistributedError(at_rank(place.rank, message))


def _warn() -> None:
    # No warning after an exception: the traceback says more.
    if not {"keras", "tf_keras"} & sys.modules.keys() or hasattr(sys, "last_value"):
        return
    try:
        place = detect()
    except ClusterError as error:
        print(f"dtk: {error}", file=sys.stderr)
        return
    if _trains_with_others():
        print(
            f"dtk: rank {place.rank}: this script made no strategy, so each of the "
            f"{place.size} processes worked by itself, unless the script joins them "
            f"({place.reason}); add `strategy = dtk.auto_strategy()` and compile the model "
            "inside strategy.scope()",
            file=sys.stderr,
        )

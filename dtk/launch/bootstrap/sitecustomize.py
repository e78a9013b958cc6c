"""Python runs this at the start of each rank, before the script: see `dtk.launch.job_processes`.

So the import of dtk itself changes nothing in a process. In a rank, once the script imports dtk,
TensorFlow or Keras, reports to the launcher begin, these imports are made faster and quieter, and
training before a strategy is made is refused. Processes that the rank starts are left alone.
"""

import contextlib
import importlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

_HERE = os.path.dirname(__file__)


def leave() -> None:
    """Take this folder from the paths again, and run the `sitecustomize` that it has hidden."""
    sys.path[:] = [one for one in sys.path if one != _HERE]
    rest = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one != _HERE]
    os.environ["PYTHONPATH"] = os.pathsep.join(rest)
    if not rest:
        del os.environ["PYTHONPATH"]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


def await_imports() -> None:
    """Have the rank begin once its script imports what it trains with, and not before.

    A script without dtk counts, too: it would train alone on every rank, and report success.
    """
    file = os.path.join(os.path.dirname(os.path.dirname(_HERE)), "importing.py")
    spec = importlib.util.spec_from_file_location("dtk_importing", file)
    assert spec is not None and spec.loader is not None
    importing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(importing)
    importing.inside("dtk", rank_begins)
    off = importing.without_collector
    importing.inside("tensorflow", of_dtk("quiet", "filtered"), off)
    # Keras imports TensorFlow, and its other objects also live as long as the process.
    importing.inside("keras", of_dtk("trainer.undistributed_jobs", "training_refused"), off)


@contextlib.contextmanager
def rank_begins() -> Iterator[None]:
    """Return the context of the import of dtk."""
    yield
    from dtk.cluster import progress

    progress.start()


def of_dtk(module: str, name: str) -> Callable[[], AbstractContextManager[None]]:
    """Return one of dtk's contexts; without dtk, in a program of another Python, one of nothing."""

    def context() -> AbstractContextManager[None]:
        if importlib.util.find_spec("dtk") is None:
            return contextlib.nullcontext()
        found: AbstractContextManager[None] = getattr(
            importlib.import_module(f"dtk.{module}"), name
        )()
        return found

    return context


leave()
if os.environ.get("DTK_RUN") == "1":
    await_imports()

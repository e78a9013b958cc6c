"""Python runs this at the start of each rank, before the script: see `dtk.launch.job_processes`.

So the import of dtk itself changes nothing in a process. In a rank, once the script imports dtk,
reports to the launcher begin, the imports of TensorFlow and Keras are made faster and quieter, and
training before a strategy is made is refused. Processes that the rank starts are left alone.
"""

import contextlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator

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


def await_dtk() -> None:
    """Have the rank begin once its script has imported dtk, and not before: it may never do so."""
    file = os.path.join(os.path.dirname(os.path.dirname(_HERE)), "importing.py")
    spec = importlib.util.spec_from_file_location("dtk_importing", file)
    assert spec is not None and spec.loader is not None
    importing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(importing)
    importing.inside("dtk", rank_begins)


@contextlib.contextmanager
def rank_begins() -> Iterator[None]:
    """Return the context of the import of dtk."""
    yield
    from dtk import importing, quiet
    from dtk.cluster import progress
    from dtk.trainer import undistributed_jobs

    progress.start()
    importing.inside("tensorflow", quiet.tensorflow_import, importing.without_collector)
    # Keras imports TensorFlow, and its other objects also live as long as the process.
    importing.inside("keras", importing.without_collector, undistributed_jobs.training_refused)


leave()
if os.environ.get("DTK_RUN") == "1":
    await_dtk()

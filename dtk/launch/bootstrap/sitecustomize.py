"""Python runs this at the start of each rank, before the script: see `dtk.launch.job_processes`.

So the import of dtk itself changes nothing in a process. In a rank an exception that ends the
script is told to the launcher; once the script imports dtk, TensorFlow or Keras, reports to the
launcher begin, these imports are made faster and quieter, and training before a strategy is made is
refused. Processes that the rank starts are left alone.
"""

import atexit
import contextlib
import functools
import importlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import ModuleType, TracebackType
from typing import NoReturn

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


def come_back() -> None:
    """Have a program that takes this rank's place, by `os.exec*`, begin as the rank did."""
    execve, process = os.execve, os.getpid()

    def replace(path: str, arguments: list[str], variables: Mapping[str, str]) -> NoReturn:
        paths = list(filter(None, [variables.get("PYTHONPATH")]))
        if os.getpid() == process:
            paths.insert(0, _HERE)
        execve(path, arguments, {**variables, "PYTHONPATH": os.pathsep.join(paths)})

    def replace_alike(path: str, arguments: list[str]) -> NoReturn:
        replace(path, arguments, os.environ)

    os.execve, os.execv = replace, replace_alike  # type: ignore[assignment]


@functools.cache
def module_of_dtk(name: str) -> ModuleType:
    """Return a module of dtk that imports no other; without the import of dtk, which is noted."""
    if (imported := sys.modules.get(f"dtk.{name}")) is not None:
        return imported
    file = os.path.join(os.path.dirname(_HERE), "..", *name.split(".")) + ".py"
    spec = importlib.util.spec_from_file_location(f"dtk_{name}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tell_of_failure() -> None:
    """Have the launcher told of the exception that ends the script, before its traceback."""
    before = sys.excepthook
    is_told = False

    def tell(error: BaseException | None) -> None:
        nonlocal is_told
        if error is None or is_told:
            return
        is_told = True
        with contextlib.suppress(Exception):  # the user is to see the script's error, not another
            errors, channel = module_of_dtk("errors"), module_of_dtk("cluster.report_channel")
            reports = [{"failure": errors.failure_record(error)}]
            reports += [{"traceback": piece} for piece in errors.traceback_pieces(error)]
            all(channel.tell(report) for report in reports)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        tell(error)
        before(kind, error, trace)

    sys.excepthook = hook
    # For a script that has put a hook of its own in the place of this one.
    atexit.register(lambda: tell(getattr(sys, "last_exc", getattr(sys, "last_value", None))))


def await_imports() -> None:
    """Have the rank begin once its script imports what it trains with, and not before.

    A script without dtk counts, too: it would train alone on every rank, and report success.
    """
    importing = module_of_dtk("importing")
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
        manager: AbstractContextManager[None] = getattr(
            importlib.import_module(f"dtk.{module}"), name
        )()
        return manager

    return context


leave()
if os.environ.get("DTK_RUN") == "1":
    # Bars of tqdm within one another take turns on one row: launchers draw no more.
    os.environ.setdefault("TQDM_POSITION", "0")
    come_back()
    tell_of_failure()
    await_imports()

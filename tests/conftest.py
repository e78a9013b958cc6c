"""Fixtures for all tests: hosts; worlds of processes, one alive at a time for each pytest."""

from __future__ import annotations

import contextlib
import fnmatch
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # whose hosts.py makes hosts

from dtk.cluster import Host  # noqa: E402

from support.lean import sitecustomize  # noqa: E402, F401  # before Keras
from support.world import World, inherited_path, missing, named_in, seed, wanted  # noqa: E402

# What every process of a test imports from: this tree first.
os.environ["PYTHONPATH"] = inherited_path()

# An example that takes long has met another test's processes, which is no fault of its own.
# `make test` tries the same examples each time; `make test-all` searches, and says how to replay.
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None, derandomize=False, print_blob=True)
settings.load_profile("same")


class _Worlds:
    """Keeps the last world until another one is wanted."""

    def __init__(self) -> None:
        self._world: World | None = None

    def __call__(self, backend: str, size: int) -> World:
        reason = missing(backend)
        if reason and os.environ.get("DTK_REQUIRE_HOROVOD") == "1":
            pytest.fail(f"DTK_REQUIRE_HOROVOD=1, but {reason}")
        if reason:
            pytest.skip(reason)
        world = self._world
        if world is None or not world.alive or (world.backend, world.size) != (backend, size):
            self.close()
            world = self._world = World(backend, size)
        return world

    def close(self) -> None:
        world, self._world = self._world, None
        if world is not None:
            world.close()


@pytest.fixture(scope="session")
def _worlds() -> Iterator[_Worlds]:
    worlds = _Worlds()
    yield worlds
    worlds.close()


@pytest.fixture
def world(_worlds: _Worlds) -> Callable[[str, int], World]:
    """`world(backend, size)`: a running world, reused while consecutive tests want the same."""
    return _worlds


@pytest.fixture(autouse=True)
def _seeded() -> None:
    seed(0)


@pytest.fixture(autouse=True)
def _signals_left_alone() -> Iterator[None]:
    """Blame the test that changes them: what later tests start would be deaf, too."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.fixture(autouse=True)
def _environment_put_back() -> Iterator[None]:
    """Undo what a test changes: a rank's variables would make a rank of every later test."""
    before = dict(os.environ)
    yield
    for name in before.keys() | os.environ.keys():
        if name not in before:
            del os.environ[name]
        elif os.environ.get(name) != before[name]:
            os.environ[name] = before[name]


@pytest.fixture
def pool(_worlds: _Worlds, request: pytest.FixtureRequest) -> World:
    """The world named by the test's `worlds` marker."""
    return _worlds(*request.param)


@pytest.fixture
def many_hosts() -> Iterator[Callable[[int], tuple[list[str], str]]]:
    """Make network namespaces on a bridge: hosts with addresses of their own, and a shell there."""
    if os.getuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    import hosts

    with contextlib.ExitStack() as stack:

        def make(count: int) -> tuple[list[str], str]:
            try:
                return stack.enter_context(hosts.hosts(count))
            except subprocess.CalledProcessError as error:
                pytest.skip(f"network namespaces do not work here: {error.stderr.decode().strip()}")

        yield make


@pytest.fixture
def two_hosts(
    many_hosts: Callable[[int], tuple[list[str], str]],
) -> tuple[list[Host], str]:
    """Two such hosts, of which the first has two slots."""
    (first, second), shell = many_hosts(2)
    return [Host(first, 2), Host(second, 1)], shell


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "worlds((backend, size), ...): run the test, with `pool`, in each of these worlds",
    )
    # Jobs that tests start beside each other would measure each other, for the user's cache.
    os.environ["DTK_CALIBRATE"] = "0"
    if config.option.markexpr and "not full" in config.option.markexpr:  # see world.py
        os.environ["DTK_TEST_REWRITING"] = "0"
    if "DTK_TEST_RESULTS" not in os.environ:  # where `once` keeps them; pytest's workers inherit it
        results = tempfile.TemporaryDirectory()
        os.environ["DTK_TEST_RESULTS"] = results.name
        config.add_cleanup(results.cleanup)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("worlds")
    if marker is not None and "pool" in metafunc.fixturenames:
        specs = [getattr(arg, "values", [arg])[0] for arg in marker.args]  # a tuple or pytest.param
        ids = [f"{backend}-{size}" for backend, size in specs]
        metafunc.parametrize("pool", marker.args, indirect=True, ids=ids)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let one worker of pytest-xdist run all tests that want the same world: it starts once.

    Worlds with most tests go first; what needs no world fills up the end. `--dist loadgroup` would
    do, but writes a group into an attribute that pytest 9.2 no longer reads, and says nothing.
    """
    from xdist.scheduler import LoadScopeScheduling

    # A process is made once for all of callbacks/, and a measurement in test_bench.py. Tests of
    # launch/ and cluster/ mostly wait for processes of plain Python: as the groups with most tests
    # they run while ranks of TensorFlow have the processors, and leave none idle at the end.
    together = ("launch/", "cluster/", "callbacks/", "cli/test_bench.py")

    class ByWorld(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            group = (name for name in together if f"tests/{name}" in nodeid)
            return named_in(nodeid) or next(group, nodeid)

    return ByWorld(config, log)


def pytest_collection_finish() -> None:
    """Never again look for garbage among what was imported; see tests/support/worker.py."""
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Iterator[None]:
    """Give cases of a test function the tier that its marks say; setup.cfg tells of the marks."""
    made = yield
    cases = made if isinstance(made, list) else []
    for mark in cases[0].iter_markers() if cases else ():
        if mark.name in ("full_but", "full_for"):
            _put_in_full(cases, mark)
    return made


def _put_in_full(cases: list[pytest.Function], mark: pytest.Mark) -> None:
    """Mark the cases that a mark names, or all but these; one that names nothing is a mistake."""
    ids = [case.callspec.id for case in cases]
    named: set[str] = set()
    for pattern in mark.args:
        found = fnmatch.filter(ids, pattern.replace("[", "[[]"))
        if not found:
            test = cases[0].originalname
            raise pytest.Collector.CollectError(f"{test}: {mark.name}: no case is {pattern!r}")
        named.update(found)
    for case, name in zip(cases, ids, strict=True):
        if (name in named) == (mark.name == "full_for"):
            case.add_marker(
                pytest.mark.full(mark.kwargs.get("why", "its other cases hold the rule"))
            )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is fast, and put tests that want the same world next to each other."""
    for item in items:
        if wanted(item) in (("", 0), ("local", 1)) and not item.get_closest_marker("command"):
            item.add_marker(pytest.mark.fast)
    if os.environ.get("DTK_TEST_GPUS"):
        kept = [item for item in items if _is_for_gpus(item)]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept
    items.sort(key=lambda item: (wanted(item), item.get_closest_marker("ends_world") is not None))


def _is_for_gpus(item: pytest.Item) -> bool:
    """Whether `make test-gpus` runs a test: TensorFlow's collectives carry its messages."""
    backend, size = wanted(item)
    if backend not in ("collective", "nccl"):
        return False
    if os.environ["DTK_TEST_GPUS"] == "real":  # ranks share a card; a rank has no second one
        return (backend, size) != ("nccl", 1)
    return item.get_closest_marker("not_on_pretended_gpus") is None

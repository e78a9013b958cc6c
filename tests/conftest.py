"""Fixtures for all tests: worlds of processes, at most one alive at a time for each pytest."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

from world import World, missing, named_in, wanted  # noqa: E402

# An example that takes long has met another test's processes, which is no fault of its own.
settings.register_profile("beside others", deadline=None)
settings.load_profile("beside others")


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


@pytest.fixture
def pool(_worlds: _Worlds, request: pytest.FixtureRequest) -> World:
    """The world named by the test's `worlds` marker."""
    return _worlds(*request.param)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "worlds((backend, size), ...): run the test, with `pool`, in each of these worlds",
    )
    # Jobs that tests start beside each other would measure each other, for the user's cache.
    os.environ["DTK_CALIBRATE"] = "0"
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

    class ByWorld(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            # The tests of callbacks share a process besides; see tests/callbacks/conftest.py.
            alone = "callbacks" if "callbacks/" in nodeid else nodeid
            return named_in(nodeid) or alone

    return ByWorld(config, log)


def pytest_collection_finish() -> None:
    """Never again look for garbage among what was imported; see tests/worker.py."""
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests that want the same world next to each other; the rest keep their order."""
    items.sort(key=wanted)

"""Fixtures for all tests: hosts; worlds of processes, one alive at a time for each pytest."""

from __future__ import annotations

import gc
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

import tiers  # noqa: E402

from dtk.cluster import Host  # noqa: E402

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


@pytest.fixture(autouse=True)
def _signals_left_alone() -> Iterator[None]:
    """Blame the test that changes them: what later tests start would be deaf, too."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.fixture
def pool(_worlds: _Worlds, request: pytest.FixtureRequest) -> World:
    """The world named by the test's `worlds` marker."""
    return _worlds(*request.param)


@pytest.fixture
def two_hosts(tmp_path: Path) -> Iterator[tuple[list[Host], str]]:
    """Two network namespaces on a bridge: hosts with addresses of their own, and a shell there."""
    if os.getuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    mark = f"dtk{uuid.uuid4().hex[:6]}"
    net = f"10.{200 + os.getpid() % 50}.{os.getpid() % 250}"
    undo: list[str] = []
    folders: list[Path] = []

    def ip(command: str, cure: str | None = None) -> None:
        subprocess.run(["ip", *shlex.split(command)], check=True, capture_output=True)
        if cure:
            undo.append(cure)

    try:
        ip(f"link add {mark}b type bridge", f"link del {mark}b")
        ip(f"addr add {net}.254/24 dev {mark}b")
        ip(f"link set {mark}b up")
        for n in (1, 2):
            ip(f"netns add {mark}{n}", f"netns del {mark}{n}")
            ip(
                f"link add {mark}v{n} type veth peer name eth0 netns {mark}{n}",
                f"link del {mark}v{n}",
            )
            ip(f"link set {mark}v{n} master {mark}b up")
            ip(f"-n {mark}{n} addr add {net}.{n}/24 dev eth0")
            ip(f"-n {mark}{n} link set eth0 up")
            ip(f"-n {mark}{n} link set lo up")
            # `ip netns exec` shows this file as /etc/hosts. Horovod 0.28.1 makes its process sets
            # on the address of the host's own name, whatever HOROVOD_GLOO_IFACE says.
            hosts_file = Path("/etc/netns", f"{mark}{n}", "hosts")
            hosts_file.parent.mkdir(parents=True)
            folders.append(hosts_file.parent)
            hosts_file.write_text(f"127.0.0.1 localhost\n{net}.{n} {socket.gethostname()}\n")
        script = tmp_path / "netns-shell"
        script.write_text(
            f'#!/bin/sh\nn=${{1##*.}}; shift; exec ip netns exec {mark}$n sh -c "$*"\n'
        )
        script.chmod(0o755)
        yield [Host(f"{net}.1", 2), Host(f"{net}.2", 1)], str(script)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces do not work here: {error.stderr.decode().strip()}")
    finally:
        for command in reversed(undo):
            subprocess.run(["ip", *shlex.split(command)], check=False, capture_output=True)
        for folder in folders:
            shutil.rmtree(folder)


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
            # These share what is made once: a process (tests/callbacks/conftest.py), a measurement.
            shared = (name for name in ("callbacks/", "cli/test_bench.py") if name in nodeid)
            return named_in(nodeid) or next(shared, nodeid)

    return ByWorld(config, log)


def pytest_collection_finish() -> None:
    """Never again look for garbage among what was imported; see tests/worker.py."""
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests their tiers, and put those that want the same world next to each other."""
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        if tiers.is_full(name):
            item.add_marker(pytest.mark.full)
        if tiers.is_fast(name, wanted(item)):
            item.add_marker(pytest.mark.fast)
    items.sort(key=wanted)

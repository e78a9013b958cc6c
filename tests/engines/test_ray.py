"""dtk on a real Ray: killed workers and nodes, other sizes, shards, trials."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from engines import ray_bodies as bodies
from support.blocks import all_blocks

pytestmark = pytest.mark.timeout(900)
SECONDS = 600
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # a report waits for the next check
    "RAY_DEDUP_LOGS": "0",
}


def quiet() -> None:
    os.environ.update(QUIET)


def start() -> None:
    import ray

    quiet()
    os.environ.update(SLURM_STEP_ID="0", SLURM_PROCID="1", SLURM_NTASKS="4")  # `srun ray start`
    ray.init("local", num_cpus=3, include_dashboard=False)


def end() -> None:
    import ray

    ray.shutdown()


@contextlib.contextmanager
def process(initializer: Callable[[], None] | None) -> Iterator[Callable[..., Any]]:
    """A process of its own, since Ray changes the one that it is in; call functions in it."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, spawn, initializer) as pool:
        pid = pool.submit(os.getpid).result(SECONDS)
        try:
            yield lambda *given, **named: pool.submit(*given, **named).result(SECONDS)
            pool.submit(end).result(60)
        finally:
            os.kill(pid, signal.SIGKILL)  # Ray's processes end with it, also where a test hangs


@pytest.fixture(scope="module")
def on_ray() -> Iterator[Callable[..., Any]]:
    with process(start) as call:
        yield call


@pytest.fixture(scope="module")
def uninterrupted() -> Any:
    with process(None) as call:
        return call(bodies.one_process)


def test_without_ray_it_says_what_to_install():
    code = "import sys; sys.modules['ray'] = None; import dtk.engines, dtk.callbacks"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print('so far'); import dtk.engines.ray"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "so far" in done.stdout
    assert re.search(r"ImportError: dtk.engines.ray needs Ray .*pip install .*\[ray\]", done.stderr)


def close(one, other):
    pairs = zip(one, other, strict=True)
    return all(np.allclose(a, b, rtol=1e-6, atol=1e-6) for a, b in pairs)


@pytest.mark.full("Ray is 250 MB, and each test takes a minute")
def test_two_workers_end_with_the_weights_of_one_process(on_ray, uninterrupted, tmp_path):
    found, reported, kept = on_ray(bodies.run, tmp_path, 2)
    assert close(found["weights"], uninterrupted)
    assert found["size"] == 2 and found["local"] == (0, 2) and found["secret"] == 64
    assert reported == list(range(1, bodies.EPOCHS + 1))
    assert kept == [f"checkpoint-{bodies.EPOCHS:08d}"]


@pytest.mark.full("Ray is 250 MB, and each test takes a minute")
def test_one_worker_trains_alone(on_ray, uninterrupted, tmp_path):
    found, _, _ = on_ray(bodies.run, tmp_path, 1)
    assert close(found["weights"], uninterrupted) and found["size"] == 1


@pytest.mark.full("Ray is 250 MB, and each test takes a minute")
@pytest.mark.parametrize(("kills", "hangs"), [({2: 1, 3: 0}, False), ({3: 1}, True)])
def test_killed_workers_are_started_again_and_resume(on_ray, uninterrupted, tmp_path, kills, hangs):
    """And those that wait for one that hangs."""
    how = {"folder": str(tmp_path), "kills": kills, "hangs": hangs}
    found, reported, _ = on_ray(bodies.run, tmp_path, 2, 2, **how)
    assert close(found["weights"], uninterrupted)
    assert found["epochs"][-2:] == [3, 4]
    assert reported == list(range(1, bodies.EPOCHS + 1))


@pytest.mark.full("Ray is 250 MB, and each test takes a minute")
def test_a_worker_that_gets_sigterm_saves_first(on_ray, uninterrupted, tmp_path):
    """Breaks as the steps since the last epoch: `fit` is in a thread, where no signal is caught."""
    how = {"folder": str(tmp_path), "kills": {3: 1}, "asks": True}
    found, reported, _ = on_ray(bodies.run, tmp_path, 2, 1, **how)
    assert close(found["weights"], uninterrupted)
    assert sorted({*reported}) == [1, 2, 3, 4, 5]
    began = sorted(int(file.read_text()) for file in tmp_path.glob("began-*"))
    assert began[:2] == [0, 0]
    assert began[2] == began[3] >= 14, "12 steps were saved at the end of the third epoch"


@pytest.mark.full("Ray is 250 MB, and each test takes a minute")
def test_the_failure_that_ray_tells_names_the_rank_that_was_first(on_ray, tmp_path):
    """Ray tells the exception of any worker, also of one that has only lost another."""
    told = on_ray(bodies.run_fails, tmp_path, 2, wrong=1)
    assert "ValueError: no such file" in told
    assert re.search(r"dtk: rank 1, host .*, failed first at .*ray_bodies.py:\d+: ValueError", told)


@pytest.mark.full("Ray is 250 MB, and each test takes a minute")
def test_a_run_goes_on_with_fewer_workers(on_ray, uninterrupted, tmp_path):
    """The same name and storage, another `ScalingConfig`."""
    folder = str(tmp_path)
    failed = on_ray(bodies.run_fails, tmp_path, 3, folder=folder, kills={3: 2})
    assert "worker" in failed
    found, reported, _ = on_ray(bodies.run, tmp_path, 2, folder=folder)
    assert close(found["weights"], uninterrupted)
    assert found["size"] == 2 and found["epochs"][-2:] == [3, 4]


@pytest.mark.full("Ray is 250 MB, and each test takes a minute")
@pytest.mark.parametrize("workers, replaced, size", [(3, True, 3), ((2, 3), False, 2)])
def test_a_lost_node(uninterrupted, tmp_path, workers, replaced, size):
    """Breaks as a checkpoint that only the lost node had."""
    with process(quiet) as call:
        found, _, _ = call(bodies.lose_a_node, tmp_path, workers, replaced)
    assert close(found["weights"], uninterrupted)
    assert found["size"] == size and (tmp_path / "paused").exists()


@pytest.mark.full("Ray is 250 MB, and each test takes a minute")
def test_every_row_of_uneven_shards_counts_once(on_ray, tmp_path):
    """Breaks as rows that Ray drops so that shards are equally long."""
    blocks = {"some": [20, 7, 23], "one": [9]}  # whoever has fewest rows gets the next block
    batches = {"some": 64, "some in steps": 8, "one": 4}
    found = on_ray(bodies.run_on_shards, tmp_path, blocks, batches)
    weights, counts, held = found["some"]
    with process(None) as call:
        assert close(weights, call(bodies.one_process, None, 50))  # all rows are one batch
    assert counts == [50] * bodies.EPOCHS and held == [20, 30]
    # three steps of one rank, and four of the other
    assert found["some in steps"][1:] == (counts, held)
    # one rank has no rows at all
    assert found["one"][1:] == ([9] * bodies.EPOCHS, [9, 0])


@pytest.mark.full("Ray is 250 MB, and each test takes a minute")
def test_a_run_on_shards_resumes_in_the_middle_of_an_epoch(on_ray, tmp_path):
    """Breaks as rows that are read twice, or in another order."""

    def run(name, kills):
        config = {"folder": str(tmp_path), "kills": kills}
        store, blocks = tmp_path / name, {"some": [20, 7, 23]}
        return on_ray(bodies.run_on_shards, store, blocks, config, bodies.train_on_a_shard)

    whole, _ = run("whole", {})
    again, epochs = run("again", {2: 1})
    assert close(again, whole) and epochs[-3:] == [2, 3, 4]


@pytest.mark.full("Ray is 250 MB, and each test takes a minute")
def test_what_the_page_shows(on_ray, tmp_path):
    """A run, and two trials of a search over it."""
    blocks = [one.text for one in all_blocks() if one.file == "docs/engines/ray.md"]
    programs = [one for one in blocks if one.startswith(("import ray", "from ray import tune"))]
    last, trials = on_ray(bodies.run_page, programs, tmp_path)
    assert last["epoch"] == 5 and len(trials) == 2
    assert {one["epoch"] for one in trials} == {5} and trials[0]["loss"] != trials[1]["loss"]


@pytest.mark.full("Ray is 250 MB, and each test takes a minute")
def test_too_small_a_cluster_is_said(on_ray):
    told = on_ray(bodies.too_small, 5)
    assert told.startswith("5 workers of 1 CPU each do not fit on Ray's 1 node(s)")
    assert "num_workers=3" in told

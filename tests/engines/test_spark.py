"""`dtk.engines.spark` on a real Spark: two executors on this machine, of one core each."""

import functools
import shutil
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest

import dtk
import dtk.engines.spark

from support.blocks import all_blocks
from support.launched import until
from support.world import missing

pytestmark = pytest.mark.timeout(600)
ATTEMPTS = 2


@pytest.fixture(scope="module")
def spark():
    """A running Spark, with what its executors print in `logs`."""
    if reason := missing("spark"):
        pytest.skip(reason)
    import pyspark
    from pyspark.sql import SparkSession

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        patch.delenv("SPARK_HOME", raising=False)
        handler = signal.getsignal(signal.SIGINT)
        session = (
            SparkSession.builder.master("local-cluster[2,1,1024]")
            .config("spark.ui.enabled", False)
            .config("spark.ui.showConsoleProgress", False)
            .config("spark.stage.maxConsecutiveAttempts", ATTEMPTS)
            .config("spark.scheduler.barrier.maxConcurrentTasksCheck.interval", "1s")
            .config("spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures", 2)
            .getOrCreate()
        )
        signal.signal(signal.SIGINT, handler)  # pyspark's own cancels all jobs first
        # where an in-process cluster writes, whatever it is told
        session.logs = Path(pyspark.__file__).parent / "work" / session.sparkContext.applicationId
        yield session
        session.stop()
        shutil.rmtree(session.logs)


def made_train():
    """What ranks run, as a function that goes to them whole, as one of a script does."""

    def train(epochs, folder=None, on_epoch=None):
        import os

        import keras
        import numpy as np

        import dtk

        strategy = dtk.auto_strategy()
        print("rank", strategy.rank, "of", strategy.size)
        keras.utils.set_random_seed(3)
        x = np.random.default_rng(0).normal(size=(60, 8)).astype("float32")
        y = x.sum(1, keepdims=True)
        with strategy.scope():
            layers = [keras.Input((8,)), keras.layers.Dense(4, "relu"), keras.layers.Dense(1)]
            model = keras.Sequential(layers)
            model.compile("adam", "mse")
        callbacks = []
        if folder:
            callbacks += [dtk.callbacks.Checkpoint(os.path.join(folder, "saved"))]
        if on_epoch:
            callbacks += [
                keras.callbacks.LambdaCallback(
                    on_epoch_begin=lambda epoch, logs: on_epoch(epoch, strategy, folder)
                )
            ]
        model.fit(x, y, batch_size=16, epochs=epochs, verbose=0, callbacks=callbacks)
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
        told = [os.environ[name] for name in (*names, "TF_NUM_INTRAOP_THREADS")]
        secret = len(os.environ["DTK_JOB_SECRET"])
        return model.get_weights(), told, secret, os.getpid()

    return _whole(train)


def _whole(function):
    """Have a function copied, not found again by its module, as those of `__main__` are."""
    function.__module__ = "__main__"
    return function


@functools.cache
def expected(epochs):
    """The weights of one process."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("DTK_JOB_SECRET", "RANK", "WORLD_SIZE", "TF_NUM_INTRAOP_THREADS"):
            patch.setenv(name, {"RANK": "0", "WORLD_SIZE": "1"}.get(name, "1"))
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
            patch.setenv(name, "0")
        return flat(made_train()(epochs)[0])


def flat(weights):
    return np.concatenate([one.ravel() for one in weights])


def assert_close(weights, epochs):
    plain = expected(epochs)
    assert np.linalg.norm(flat(weights) - plain) <= 1e-5 * np.linalg.norm(plain)


def printed(spark):
    return "".join(path.read_text() for path in spark.logs.rglob("stderr"))


@pytest.mark.full("Spark is 600 MB with Java")
def test_ranks_end_with_the_weights_of_one_process_and_so_do_those_of_a_second_run(spark):
    """Breaks as a rank in Spark's own Python process: its collectives have started before."""
    weights, told, secret, first = dtk.engines.spark.run(made_train(), 2, (2,))
    assert_close(weights, 2)
    assert told == ["0", "2", "0", "2", "127.0.0.1", "1"] and secret == 64
    weights, _, _, second = dtk.engines.spark.run(made_train(), num_workers=2, args=(3,))
    assert_close(weights, 3)
    assert first != second and not psutil.pid_exists(second)
    assert "[1] rank 1 of 2\n" in printed(spark)


@pytest.mark.full("Spark is 600 MB with Java")
def test_a_rank_that_fails_is_named_with_its_line(spark):
    """The other rank waits for it in a collective."""

    def fails(epoch, strategy, folder):
        if strategy.rank == 1:
            raise ValueError("boom\nand more")

    began = printed(spark).count("[1] ValueError: boom")
    said = r"^rank 1 on 127\S+ failed at \S+test_spark.py:\d+: ValueError: boom\nand more\nTrace"
    with pytest.raises(dtk.errors.RankError, match=said) as caught:
        dtk.engines.spark.run(made_train(), 2, (2, None, _whole(fails)))
    assert ", in fails\n" in str(caught.value) and "org.apache" not in str(caught.value)
    assert printed(spark).count("[1] ValueError: boom") == began + ATTEMPTS


@pytest.mark.full("Spark is 600 MB with Java")
def test_a_rank_that_leaves_without_a_result_is_named(spark):
    """Spark's error was about a file in a temporary folder."""
    import os

    with pytest.raises(dtk.errors.RankError, match="^rank 0 on .* ended with exit code 0;"):
        dtk.engines.spark.run(lambda: os._exit(0), 2)


@pytest.mark.full("Spark is 600 MB with Java")
def test_a_rank_that_is_waited_for_and_one_that_trains_alone_are_refused(spark):
    def stalls():
        import os
        import time

        os.environ["DTK_STALL_TIMEOUT"] = "5"
        import dtk

        strategy = dtk.auto_strategy()
        if strategy.rank == 1:
            time.sleep(600)
        strategy.communicator.barrier()

    def trains_alone():
        import keras
        import numpy as np

        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.fit(np.ones((4, 4)), np.ones((4, 1)), verbose=0)

    said = r"(?s)^rank 0 on \S+ ended with exit code 124.*rank 1\b.* in stalls"
    with pytest.raises(dtk.errors.RankError, match=said):
        dtk.engines.spark.run(_whole(stalls))
    with pytest.raises(dtk.errors.RankError, match="before any strategy was made, in a job of 2"):
        dtk.engines.spark.run(_whole(trains_alone))


@pytest.mark.full("Spark is 600 MB with Java")
@pytest.mark.parametrize("what", ["rank", "executor"])
def test_what_is_killed_starts_again_and_ends_as_without(spark, tmp_path, what):
    """In the third epoch, once; ranks leave their ids, and those of programs they have started."""

    def kills(epoch, strategy, folder):
        import os
        import signal
        import subprocess

        import psutil

        if epoch == 0:
            started = subprocess.Popen(["sleep", "600"])
            with open(os.path.join(folder, "ids"), "a") as file:
                file.write(f"{os.getpid()} {started.pid} ")
        if epoch != 2 or os.path.exists(os.path.join(folder, "killed")) or strategy.rank == 0:
            return
        open(os.path.join(folder, "killed"), "w").close()
        above = [one.pid for one in psutil.Process().parents() if one.name() == "java"]
        os.kill(above[0] if what == "executor" else os.getpid(), signal.SIGKILL)

    folder = str(tmp_path)
    weights, *_ = dtk.engines.spark.run(made_train(), 2, (4, folder, _whole(kills)))
    assert_close(weights, 4)
    assert (tmp_path / "killed").exists()
    assert "resuming at epoch 3/4" in printed(spark)
    ids = [int(one) for one in (tmp_path / "ids").read_text().split()]
    assert len(ids) == 4  # of the first attempt; the second has not begun at epoch 0
    until(lambda: not any(map(psutil.pid_exists, ids)))


@pytest.mark.full("Spark is 600 MB with Java")
def test_a_cancelled_job_leaves_nothing_running(spark, tmp_path):
    def waits(epoch, strategy, folder):
        if strategy.rank:
            return  # and waits in the first step
        import os
        import subprocess
        import time

        started = subprocess.Popen(["sleep", "600"])
        with open(os.path.join(folder, "draft"), "w") as file:
            file.write(f"{os.getpid()} {started.pid}")
        os.rename(file.name, os.path.join(folder, "0"))
        time.sleep(600)

    def cancels():
        until(lambda: (tmp_path / "0").exists(), 200)
        spark.sparkContext.cancelAllJobs()

    threading.Thread(target=cancels).start()
    with pytest.raises(Exception, match="cancelled"):
        dtk.engines.spark.run(made_train(), 2, (1, str(tmp_path), _whole(waits)))
    ids = [int(one) for one in (tmp_path / "0").read_text().split()]
    until(lambda: not any(map(psutil.pid_exists, ids)))


@pytest.mark.full("Spark is 600 MB with Java")
def test_more_ranks_than_slots_are_refused(spark, monkeypatch):
    with pytest.raises(dtk.errors.ClusterError, match="num_workers='2': expected a number"):
        dtk.engines.spark.run(made_train(), "2")
    with pytest.raises(dtk.errors.ClusterError, match="num_workers=3, but Spark has 2 slots .*"):
        dtk.engines.spark.run(made_train(), 3)
    monkeypatch.setattr(dtk.engines.spark, "_check_slots", lambda *_: None)  # not known elsewhere
    with pytest.raises(dtk.errors.ClusterError, match=r"ranks: \[SPARK-24819\].*more slots than"):
        dtk.engines.spark.run(made_train(), 3)


@pytest.mark.full("Spark is 600 MB with Java")
def test_rows_of_a_data_frame_are_read_by_their_ranks(spark, tmp_path):
    """Three files for two ranks: each row is seen once."""
    rows = spark.sparkContext.parallelize([(float(i), 2.0 * i) for i in range(21)], 3)
    folder = str(tmp_path / "rows")
    spark.createDataFrame(rows, "x double, y double").write.parquet(folder)

    def train(folder):
        import keras
        import numpy as np
        import pyarrow.dataset
        import tensorflow as tf

        import dtk

        strategy = dtk.auto_strategy()
        files = list(pyarrow.dataset.dataset(folder).get_fragments())
        parts = [part for file in files for part in file.split_by_row_group()]
        tables = [part.to_table() for part in parts[strategy.rank :: strategy.size]]
        x, y = (np.concatenate([table[name] for table in tables])[:, None] for name in "xy")
        own = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
        with strategy.scope():
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse", metrics=["mae"])
        mae = model.evaluate(strategy.distribute_datasets_from_function(lambda _: own), verbose=0)
        weight, bias = (float(one.ravel()[0]) for one in model.get_weights())
        return len(parts), len(x), mae, weight, bias

    parts, own, (_, mae), weight, bias = dtk.engines.spark.run(_whole(train), 2, (folder,))
    assert (parts, own) == (3, 14)
    x = np.arange(21)
    assert mae == pytest.approx(np.abs(weight * x + bias - 2 * x).mean(), rel=1e-5)


@pytest.mark.full("Spark is 600 MB with Java")
def test_what_the_documentation_shows(spark, tmp_path):
    (code,) = (one.text for one in all_blocks() if one.file == "docs/engines/spark.md")
    names = {"__name__": "__main__", "spark": spark, "folder": str(tmp_path), "dtk": dtk}
    exec(compile(code, "documentation", "exec"), names)
    kernel, _ = names["weights"]
    assert kernel.shape == (1, 1) and np.isfinite(kernel).all()
    assert len([*(tmp_path / "rows").glob("*.parquet")]) == 8
    assert any((tmp_path / "saved").iterdir())


def test_without_pyspark_the_way_to_it_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyspark", None)
    monkeypatch.setitem(sys.modules, "py4j", None)
    monkeypatch.setitem(sys.modules, "py4j.protocol", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs pyspark 4: pip install .*\[spark\]"):
        dtk.engines.spark.run(print)

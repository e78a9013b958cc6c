"""What runs on Ray: functions of workers, and of the process that starts them."""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path

EPOCHS, ROWS = 5, 50


def rows(count=ROWS):
    import numpy as np

    x = np.random.default_rng(0).random((count, 4), "float32")
    return x, x.sum(1)


def compiled(strategy, rate=0.05):
    import keras

    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((4,)), *layers])
        model.compile(keras.optimizers.SGD(rate, momentum=0.9), "mse")
    return model


def killer(folder, kills, at=1, hangs=False, asks=False):
    """A callback that ends ranks, or holds them, at a step of epochs, each once: {epoch: rank}."""
    import keras

    import dtk

    class Kill(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            rank, epoch = dtk.cluster.detect().rank, self.epoch
            done = Path(folder, f"killed-{epoch}")
            if batch == at and kills.get(epoch) == rank and not done.exists():
                done.touch()
                if asks:
                    os.kill(os.getpid(), signal.SIGTERM)
                    time.sleep(5)  # until the main thread, which is Ray's, runs Python again
                    return
                if not hangs:
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch, began = epoch, Path(folder, f"began-{os.getpid()}")
            if asks and not began.exists():
                began.write_text(str(int(self.model.optimizer.iterations)))

    return Kill()


def train(config):
    """Train on arrays; returns the weights, and how the group looked."""
    import ray.train

    import dtk
    from dtk.engines.ray import ReportToRay

    strategy = dtk.strategies.AllReduceStrategy(stall_timeout=10)
    model = compiled(strategy, config.get("rate", 0.05))
    hangs = config.get("hangs", False)
    asks = config.get("asks", False)
    kill = killer(config.get("folder", ""), config.get("kills", {}), hangs=hangs, asks=asks)
    callbacks = [ReportToRay(), kill]
    if config.get("slow"):
        callbacks.append(pause(config["folder"], config["slow"]))
    if config.get("wrong"):
        callbacks.append(wrong(config["wrong"]))
    history = model.fit(*rows(), 16, epochs=EPOCHS, verbose=0, callbacks=callbacks)
    if config.get("fails_at_size") == strategy.size:
        raise RuntimeError("as the test wants it")
    return {
        "weights": [weight.tolist() for weight in model.get_weights()],
        "size": strategy.size,
        "local": (strategy.local_rank, strategy.communicator.local_size),
        "secret": len(os.environ["DTK_JOB_SECRET"]),
        "epochs": history.epoch,
        "node": ray.get_runtime_context().get_node_id(),
    }


def pause(folder, epoch):
    """A callback that waits, once, in the middle of an epoch until its process is killed."""
    import keras

    class Pause(keras.callbacks.Callback):
        def on_epoch_end(self, number, logs=None):
            done = Path(folder, "paused")
            if number == epoch and not done.exists():
                if os.environ["RANK"] == "0":
                    done.touch()
                time.sleep(60)

    return Pause()


def wrong(rank):
    """A callback that raises on one rank."""
    import keras

    import dtk

    class Wrong(keras.callbacks.Callback):
        def on_epoch_end(self, number, logs=None):
            if dtk.cluster.detect().rank == rank:
                raise ValueError("no such file")

    return Wrong()


def one_process(data=None, batch=16):
    """The weights of one process that was not interrupted."""
    import dtk

    model = compiled(dtk.strategies.AllReduceStrategy("local"))
    model.fit(*(data or rows()), batch, epochs=EPOCHS, verbose=0)
    return [weight.tolist() for weight in model.get_weights()]


def run(store, workers, failures=0, name="run", **config):
    """Train on Ray; returns rank 0's result, and the numbers that were reported."""
    import ray.train

    from dtk.engines.ray import KerasTrainer

    result = KerasTrainer(
        train,
        config,
        scaling_config=ray.train.ScalingConfig(num_workers=workers),
        run_config=ray.train.RunConfig(
            name=name,
            storage_path=str(store),
            failure_config=ray.train.FailureConfig(max_failures=failures),
        ),
    ).fit()
    told = result.metrics_dataframe
    kept = sorted(os.listdir(result.checkpoint.path))
    return result.return_value, [int(epoch) for epoch in told["epoch"]], kept


def run_fails(*arguments, **config):
    """Train on Ray, and return the failure."""
    import ray.train

    try:
        run(*arguments, **config)
    except ray.train.TrainingFailedError as error:
        return str(error)
    raise AssertionError("it has not failed")


def too_small(workers):
    """What is said where the cluster has no room."""
    import ray.train

    from dtk.engines.ray import KerasTrainer

    scaling = ray.train.ScalingConfig(num_workers=workers)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        try:
            KerasTrainer(train, {}, scaling_config=scaling).fit()
        except RuntimeWarning as warning:
            return str(warning)


def train_on_shards(config):
    """Train on this rank's shards, in batches of so many rows.

    Returns the weights, the rows of each epoch, and those of each rank.
    """
    import keras
    import ray.train

    import dtk
    from dtk.callbacks.strategy_callback import count_rows

    strategy = dtk.strategies.AllReduceStrategy()
    found = {}
    for name, batch in config.items():
        model = compiled(strategy)
        shard = ray.train.get_dataset_shard(name.split()[0])
        held = sum(len(part["y"]) for part in shard.iter_batches(batch_size=None))
        data = strategy.distribute_datasets_from_function(
            lambda context, shard=shard, batch=batch: shard.to_tf("x", "y", batch_size=batch)
        )
        counts = []
        count = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda *_, model=model, counts=counts: counts.append(count_rows(model))
        )
        model.fit(data, epochs=EPOCHS, verbose=0, callbacks=[count])
        weights = [weight.tolist() for weight in model.get_weights()]
        found[name] = weights, counts, strategy.communicator.allgather_object(held)
    return found


def train_on_a_shard(config):
    """Train on this rank's shard, and save every second step; returns the weights."""
    import ray.train

    import dtk
    from dtk.engines.ray import ReportToRay

    strategy = dtk.strategies.AllReduceStrategy()
    model = compiled(strategy)
    shard = ray.train.get_dataset_shard("some")
    data = strategy.distribute_datasets_from_function(
        lambda context: shard.to_tf("x", "y", batch_size=8)
    )
    callbacks = [ReportToRay(save_freq=2), killer(config["folder"], config["kills"], at=3)]
    history = model.fit(data, epochs=EPOCHS, verbose=0, callbacks=callbacks)
    return [weight.tolist() for weight in model.get_weights()], history.epoch


def run_on_shards(store, blocks, config, function=train_on_shards):
    """Run a function on datasets of Ray's, {name: rows of each block}; returns what it returns."""
    import numpy as np
    import ray.data
    import ray.train

    from dtk.engines.ray import KerasTrainer

    def dataset(sizes):
        x, y = rows(sum(sizes))
        cuts = np.cumsum(sizes)[:-1]
        parts = [
            ray.data.from_items(
                [{"x": one, "y": other} for one, other in zip(*part, strict=True)],
                override_num_blocks=1,
            )
            for part in zip(np.split(x, cuts), np.split(y, cuts), strict=True)
        ]
        return parts[0].union(*parts[1:]) if len(parts) > 1 else parts[0]

    trainer = KerasTrainer(
        function,
        config,
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            name="shards",
            storage_path=str(store),
            failure_config=ray.train.FailureConfig(max_failures=1),
        ),
        datasets={name: dataset(sizes) for name, sizes in blocks.items()},
    )
    return trainer.fit().return_value


def lose_a_node(store, workers, replaced):
    """Train on two nodes, and lose the second in the middle; returns as `run` does."""
    import concurrent.futures

    import ray
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 2, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    second = cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        training = thread.submit(run, store, workers, 1, folder=str(store), slow=3)
        while not Path(store, "paused").exists() and not training.done():
            time.sleep(0.1)
        cluster.remove_node(second, allow_graceful=False)
        if replaced:
            cluster.add_node(num_cpus=1)
        found = training.result()
    ray.shutdown()
    cluster.shutdown()
    return found


def run_page(programs, store):
    """Run the programs of a page, in one namespace; returns that of the last."""
    names = {}
    for program in programs:
        exec(program.replace("/shared/results", str(store)), names)
    return names["result"].metrics, [one.metrics for one in names["trials"]]

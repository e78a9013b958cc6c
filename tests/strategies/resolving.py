"""What tests of `strategy.cluster_resolver` run on every rank, or on the chief."""

from __future__ import annotations

import os

import numpy as np

from strategies import bodies


def told(served=False):
    """What TensorFlow's words for this process are, and who is to write."""
    strategy = bodies.served() if served else bodies.strategy()
    resolver, extended = strategy.cluster_resolver, strategy.extended
    return {
        "task": (resolver.task_type, resolver.task_id),
        "cluster": resolver.cluster_spec().as_dict(),
        "rpc": resolver.rpc_layer,
        "writes": (extended.should_checkpoint, extended.should_save_summary),
    }


def is_chief(task_type, task_id, cluster_spec):
    """As TensorFlow's tutorial on several workers tells the chief."""
    if task_type is None or task_type == "chief":
        return True
    return task_type == "worker" and task_id == 0 and "chief" not in cluster_spec.as_dict()


def write_filepath(path, task_type, task_id, cluster_spec):
    """The tutorial's: where this task saves, the chief for good and the others to throw away."""
    folder, name = os.path.split(path)
    if not is_chief(task_type, task_id, cluster_spec):
        folder = os.path.join(folder, f"workertemp_{task_id}")
        os.makedirs(folder)
    return os.path.join(folder, name)


def saved_as_the_tutorial_does(folder):
    """Train, let every worker save, delete what is not the chief's; returns what was where."""
    import keras
    import tensorflow as tf

    strategy = bodies.strategy()
    x = np.linspace(-1, 1, 40).reshape(10, 4).astype("float32")
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(x, x[:, :1], batch_size=4, verbose=0)

    resolver = strategy.cluster_resolver
    task = resolver.task_type, resolver.task_id, resolver.cluster_spec()
    path = write_filepath(os.path.join(folder, "model.keras"), *task)
    model.save(path)
    saved = keras.models.load_model(path, compile=False)
    weights = [np.array_equal(a, b) for a, b in zip(saved.weights, model.weights, strict=True)]

    checkpoint = tf.train.Checkpoint(model=model)
    place = write_filepath(os.path.join(folder, "checkpoints", "last"), *task)
    tf.train.CheckpointManager(checkpoint, directory=place, max_to_keep=1).save()

    strategy.communicator.barrier()
    files = sorted(
        os.path.relpath(os.path.join(where, name), folder)
        for where, _, names in os.walk(folder)
        for name in names
    )
    return is_chief(*task), os.path.relpath(path, folder), all(weights), files

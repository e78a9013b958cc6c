"""`dtk.migrate.tf_distribute`: TensorFlow's names, each usable or with what replaces it."""

from __future__ import annotations

import os
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtk.errors import ReplacedError
from dtk.migrate import replaced_names, tf_distribute
from dtk.strategies import AllReduceStrategy, MirroredStrategy

# Parts of `tf.distribute` whose names are looked up one by one.
PARTS = ("", "experimental.", "cluster_resolver.")


def of(module, part):
    return getattr(module, part.rstrip(".")) if part else module


@pytest.mark.parametrize("part", PARTS, ids=["distribute", "experimental", "cluster_resolver"])
def test_every_name_is_there_or_says_what_replaces_it(part):
    theirs, ours, seen = of(tf.distribute, part), of(tf_distribute, part), 0
    for name in dir(theirs):
        if name.startswith("_"):
            continue
        full, seen = f"{part}{name}", seen + 1
        if full in replaced_names.REPLACED:
            with pytest.raises(AttributeError, match=name) as error:
                getattr(ours, name)
            assert replaced_names.REPLACED[full] in str(error.value)
        elif full in replaced_names.KEPT:
            assert getattr(ours, name) is getattr(theirs, name)
        else:
            assert isinstance(getattr(ours, name), type | types.ModuleType | types.FunctionType)
    assert seen > 5
    with pytest.raises(AttributeError, match="no such name either"):
        _ = ours.Nothing


def test_strategies_take_tensorflows_arguments(capsys):
    options = tf_distribute.experimental.CommunicationOptions()
    resolver = tf_distribute.cluster_resolver.TFConfigClusterResolver()
    made = tf_distribute.MultiWorkerMirroredStrategy(resolver, communication_options=options)
    assert isinstance(made, AllReduceStrategy) and made.num_replicas_in_sync == 1
    assert "communication_options=) changes nothing" in capsys.readouterr().err
    ops = tf_distribute.ReductionToOneDevice()
    assert isinstance(tf_distribute.MirroredStrategy(cross_device_ops=ops), MirroredStrategy)
    assert "changes nothing" in capsys.readouterr().err
    assert tf_distribute.experimental.MultiWorkerMirroredStrategy is type(made)
    spec = tf.train.ClusterSpec({"worker": ["a:1"]})
    other = tf.distribute.cluster_resolver.SimpleClusterResolver(spec)
    for strategy in ("MultiWorkerMirroredStrategy", "ParameterServerStrategy"):
        with pytest.raises(ReplacedError, match="SimpleClusterResolver: the launcher tells"):
            getattr(tf_distribute, strategy)(cluster_resolver=other)
    with pytest.raises(ReplacedError, match="port_base=1"):
        tf_distribute.cluster_resolver.SlurmClusterResolver(port_base=1)


@pytest.mark.parametrize("role", ["ps", "chief"])
def test_the_resolver_tells_the_task_of_tf_config(role, monkeypatch):
    cluster = '{"chief": ["a:1"], "worker": ["b:2"], "ps": ["c:3"]}'
    task = f'{{"type": "{role}", "index": 0}}'
    monkeypatch.setenv("TF_CONFIG", f'{{"cluster": {cluster}, "task": {task}}}')
    found = tf_distribute.cluster_resolver.TFConfigClusterResolver()
    assert (found.task_type, found.task_id) == (role, 0)
    assert found.cluster_spec().as_dict()["ps"] == ["c:3"]


def save_as_chief(folder):
    """What TensorFlow's tutorial of several workers does to save, with the names changed."""
    strategy = tf_distribute.MultiWorkerMirroredStrategy()

    def is_chief(task_type, task_id):
        return (task_type == "worker" and task_id == 0) or task_type is None

    def write_filepath(filepath, task_type, task_id):
        dirpath, base = os.path.split(filepath)
        if not is_chief(task_type, task_id):
            dirpath = os.path.join(dirpath, f"workertemp_{task_id}")
            tf.io.gfile.makedirs(dirpath)
        return os.path.join(dirpath, base)

    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    rows = tf.data.Dataset.from_tensor_slices((np.ones((8, 2)), np.ones((8, 1)))).batch(4)
    model.fit(rows, verbose=0)
    cut = strategy.experimental_distribute_dataset(rows)
    own = [len(strategy.experimental_local_results(x)[0]) for x, _ in cut]
    resolver = strategy.cluster_resolver
    task = resolver.task_type, resolver.task_id
    path = write_filepath(f"{folder}/model.keras", *task)
    model.save(path)
    if not is_chief(*task):
        tf.io.gfile.rmtree(os.path.dirname(path))
    return task, strategy.num_replicas_in_sync, own, model.get_weights()[0]


@pytest.mark.parametrize("backend, size", [("collective", 2)])
def test_the_chief_saves(world, backend, size, tmp_path):
    results = world(backend, size).run(save_as_chief, str(tmp_path))
    assert [task for task, *_ in results] == [("worker", 0), ("worker", 1)]
    assert [(n, own) for _, n, own, _ in results] == [(2, [2, 2])] * 2
    assert [file.name for file in tmp_path.iterdir()] == ["model.keras"]
    saved = keras.models.load_model(tmp_path / "model.keras").get_weights()[0]
    np.testing.assert_array_equal(saved, results[1][3])

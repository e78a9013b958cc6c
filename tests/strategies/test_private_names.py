"""Every private name dtk uses of TensorFlow and Keras: what an upgrade removed is said plainly."""

from __future__ import annotations

import importlib
import inspect

import keras
import pytest
import tensorflow as tf

EXTENDED = [
    "_create_variable",
    "_call_for_each_replica",
    "_reduce_to",
    "_batch_reduce_to",
    "_gather_to_implementation",
    "_replica_ctx_all_reduce",
    "_use_merge_call",
    "_num_replicas_in_sync",
    "_get_local_replica_id",
    "_experimental_distribute_dataset",
    "_distribute_datasets_from_function",
    "_experimental_distribute_values_from_function",
]
TENSORFLOW = {
    "distribute.distribute_lib": [
        "ReplicaContext",
        "InputContext",
        "ValueContext",
        "StrategyExtendedV2._replica_ctx_all_reduce",
    ],
    "distribute.distribute_utils": [
        "create_mirrored_variable",
        "regroup",
        "VARIABLE_CLASS_MAPPING",
        "VARIABLE_POLICY_MAPPING",
    ],
    "distribute.input_lib": ["DistributedDataset"],
    "distribute.one_device_strategy": [f"OneDeviceExtended.{name}" for name in EXTENDED],
    "distribute.mirrored_strategy": [f"MirroredExtended.{name}" for name in EXTENDED],
    "distribute.values": [
        "PerReplica",
        "DistributedVariable._get_on_device_or_primary",
        "MirroredVariable",
        "SyncOnReadVariable",
    ],
    "distribute.parameter_server_strategy_v2": [
        "ParameterServerStrategyV2._connect_to_cluster",
        "ParameterServerStrategyV2._verify_args_and_config",
        "ParameterServerStrategyV2Extended._create_variable",
        "ParameterServerStrategyV2Extended._create_variable_round_robin",
        "ParameterServerStrategyV2Extended._experimental_distribute_dataset",
    ],
    "distribute.sharded_variable": ["ShardedVariable"],
    "distribute.coordinator.cluster_coordinator": ["Cluster.schedule", "_is_worker_failure"],
    "distribute.coordinator.coordinator_context": ["get_current_dispatch_context"],
    "framework.auto_control_deps_utils": ["register_read_only_resource_op"],
    "framework.ops": ["colocate_with"],
    "framework.op_def_registry": ["get"],
    "data.util.structure": ["to_tensor_list", "from_compatible_tensor_list"],
    "data.ops.map_op": ["_MapDataset", "_ParallelMapDataset"],
    "data.ops.batch_op": ["_BatchDataset", "_ParallelBatchDataset"],
    "data.ops.prefetch_op": ["_PrefetchDataset"],
    "data.ops.repeat_op": ["_RepeatDataset"],
    "data.ops.skip_op": ["_SkipDataset"],
    "data.ops.take_op": ["_TakeDataset"],
    "data.ops.cache_op": ["CacheDataset"],
    "data.ops.dataset_ops": ["_OptionsDataset"],
    "eager.context": ["global_seed"],
}
KERAS = {
    "backend.tensorflow.nn": ["_compute_moments_sync"],
    "losses.loss": [
        "scale_loss_for_distribution",
        "unscale_loss_for_distribution",
        "reduce_weighted_values",
        "apply_mask",
    ],
    "backend.common.variables": ["Variable.assign"],
    "backend.Variable": ["_initialize", "_initialize_with_initializer", "value"],
    "backend.tensorflow.numpy": ["take"],
    "saving.saving_lib": ["save_model", "save_weights_only", "H5IOStore.close", "_save_state"],
    "legacy.saving.legacy_h5_format": ["save_model_to_hdf5"],
    "trainers.trainer": [
        "Trainer.compile",
        "Trainer._symbolic_build",
        "Trainer._resolve_auto_jit_compile",
        "Trainer._get_metrics_result_or_logs",
    ],
    "backend.tensorflow.trainer": [
        "TensorFlowTrainer._make_function",
        "TensorFlowTrainer._maybe_symbolic_build",
        "TensorFlowTrainer.make_train_function",
        "TensorFlowTrainer.make_test_function",
        "TensorFlowTrainer.make_predict_function",
    ],
    "optimizers.base_optimizer": [
        "BaseOptimizer._clip_gradients",
        "BaseOptimizer._var_key",
    ],
    "backend.tensorflow.optimizer": ["TFOptimizer._all_reduce_sum_gradients"],
    "trainers.data_adapters.array_data_adapter": ["ArrayDataAdapter"],
    "trainers.data_adapters.tf_dataset_adapter": ["TFDatasetAdapter"],
}


def names(root, table):
    return [(root, part, name) for part, listed in table.items() for name in listed]


@pytest.mark.parametrize(
    "root, part, name", names("tensorflow.python", TENSORFLOW) + names("keras.src", KERAS)
)
def test_is_still_there(root, part, name):
    try:
        found = importlib.import_module(f"{root}.{part}")
    except ModuleNotFoundError:
        module, _, attribute = part.rpartition(".")
        found = getattr(importlib.import_module(f"{root}.{module}"), attribute)
    for step in name.split("."):
        assert hasattr(found, step), f"{root}.{part} has lost {name}: see dtk/strategies"
        found = getattr(found, step)


@pytest.mark.parametrize("name", ["_distribute_strategy", "_initial_epoch", "_compile_loss"])
def test_model_attributes(name):
    assert hasattr(keras.Sequential(), name), f"keras.Model has lost {name}"


def test_model_methods():
    assert hasattr(keras.Sequential(), "_flatten_layers"), "keras.Model has lost _flatten_layers"


def test_embedding_attributes():
    layer = keras.layers.Embedding(3, 2)
    layer.build()
    assert hasattr(layer, "_embeddings"), "keras.layers.Embedding has lost _embeddings"


def test_the_take_that_embedding_layers_call():
    """Breaks when a lookup goes another way, so that workers would fetch whole tables."""
    assert "ops.take(self.embeddings" in inspect.getsource(keras.layers.Embedding.call)


def test_optimizer_attributes():
    optimizer = keras.optimizers.SGD(gradient_accumulation_steps=2)
    optimizer.build([keras.Variable([1.0])])
    for name in (
        "_distribution_strategy",
        "_accumulated_gradients",
        "_learning_rate",
        "_trainable_variables",
        "_trainable_variables_indices",
    ):
        assert hasattr(optimizer, name), f"keras.optimizers.Optimizer has lost {name}"


def test_muon_tells_what_it_updates_as_adamw_does():
    muon = keras.optimizers.Muon()
    assert muon._should_use_adamw(keras.Variable([1.0]))
    assert not muon._should_use_adamw(keras.Variable([[1.0]], name="kernel"))


def test_multi_optimizer_attributes():
    optimizer = keras.optimizers.MultiOptimizer(lambda variable: keras.optimizers.SGD())
    optimizer.build([keras.Variable([1.0])])
    name = "_var_to_optimizer_idx"
    assert hasattr(optimizer, name), f"keras.optimizers.MultiOptimizer has lost {name}"


def test_variable_value():
    assert isinstance(keras.Variable([1.0])._value, tf.Variable)


def test_variable_path():
    variable = keras.Variable([1.0])
    variable._path = "layer/kernel"
    assert variable.path == "layer/kernel", "keras.Variable has lost _path"


def test_epoch_iterator_keeps_its_dataset():
    from keras.src.backend.tensorflow.trainer import TFEpochIterator

    source = inspect.getsource(TFEpochIterator)
    assert "self._distributed_dataset" in source, "TFEpochIterator has lost _distributed_dataset"


def test_distributed_values_hold_their_components():
    from tensorflow.python.distribute.values import PerReplica

    assert PerReplica((tf.constant(1), tf.constant(2))).values[1] == 2


def test_replica_context_id():
    replica = tf.distribute.get_replica_context()
    assert hasattr(replica, "_replica_id_in_sync_group")


def test_the_early_return_dtk_relies_on():
    """Breaks when Keras asks `make_train_function` for something else than `train_function`."""
    from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

    assert "self.make_train_function()" in inspect.getsource(TensorFlowTrainer.fit)
    assert "self.train_function(iterator)" in inspect.getsource(TensorFlowTrainer.fit)


def test_where_fit_asks_what_an_epochs_steps_said():
    """Breaks when a run resumed in its validation would no longer be answered there."""
    from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

    before, _, after = inspect.getsource(TensorFlowTrainer.fit).partition("self.evaluate(")
    assert "self._get_metrics_result_or_logs(logs)" in before
    assert "_get_metrics_result_or_logs" not in after

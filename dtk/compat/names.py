"""Every private name of TensorFlow and Keras that dtk uses, and its purpose.

Private names move from version to version. If dtk finds a name by its package or public class, it
is listed there (`keras.src.backend.tensorflow.*`, `keras.Model`). If a name is missing, a one-line
error says so before anything trains; `dtk doctor` checks all names.

Names that only later versions have are not listed; dtk checks for them where it uses them: Keras
3.15's `_var_to_optimizer_idx`, Keras 3.16's `_weight_decay_by_var_key` and
`ArrayDataAdapter._epoch`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from types import ModuleType

from dtk import version
from dtk.errors import VersionError

# purpose:
#     module, class or package  names in it
_TABLE = """
strategies of one replica per process:
    tensorflow.python.distribute.distribute_lib  ReplicaContext._replica_id_in_sync_group
    tensorflow.python.distribute.distribute_utils  create_mirrored_variable regroup select_replica
        VARIABLE_CLASS_MAPPING VARIABLE_POLICY_MAPPING
    tensorflow.python.distribute.one_device_strategy.OneDeviceExtended  _create_variable
        _call_for_each_replica _reduce_to _batch_reduce_to _gather_to_implementation
        _replica_ctx_all_reduce _use_merge_call _num_replicas_in_sync _get_local_replica_id
        _experimental_distribute_dataset _distribute_datasets_from_function
        _experimental_distribute_values_from_function _container_strategy _device
    tensorflow.python.distribute.values  PerReplica.values PerReplicaSpec DistributedVariable._get
        DistributedVariable._get_on_device_or_primary MirroredVariable SyncOnReadVariable
    tensorflow.python.eager.context  global_seed internal_operation_seed context
    tensorflow.python.ops.control_flow_util  GraphOrParentsInXlaContext
strategies of several devices:
    tensorflow.python.distribute.mirrored_strategy.MirroredExtended  _create_variable
        _call_for_each_replica _reduce_to _batch_reduce_to _gather_to_implementation
        _replica_ctx_all_reduce _use_merge_call _num_replicas_in_sync _get_local_replica_id
        _experimental_distribute_dataset _distribute_datasets_from_function
        _experimental_distribute_values_from_function _devices
    tensorflow.python.distribute.mirrored_strategy.MirroredStrategy  _collective_key_base
    tensorflow.python.distribute.distribute_lib.StrategyExtendedV2  _replica_ctx_all_reduce
    tensorflow.python.framework.auto_control_deps_utils  register_read_only_resource_op
        get_read_write_resource_inputs
    tensorflow.python.framework.func_graph  FuncGraph._watched_variables
the wait for a silent task:
    tensorflow.python.eager.context.Context  configure_coordination_service
    tensorflow.compiler.xla.tsl.protobuf.coordination_config_pb2  CoordinatedJob
parameter servers:
    tensorflow.python.distribute.parameter_server_strategy_v2.ParameterServerStrategyV2
        _connect_to_cluster _verify_args_and_config _cluster_resolver _cluster_coordinator
        _should_use_with_coordinator _canonicalize_devices _is_parameter_server_strategy_v2
    tensorflow.python.distribute.parameter_server_strategy_v2.ParameterServerStrategyV2Extended
        _create_variable _create_variable_round_robin _experimental_distribute_dataset
        _use_merge_call _num_ps
    tensorflow.python.distribute.sharded_variable  ShardedVariable
    tensorflow.python.trackable.base  VARIABLE_VALUE_KEY Trackable._serialize_to_tensors
        Trackable._restore_from_tensors
    tensorflow.python.distribute.coordinator.cluster_coordinator  Cluster.schedule
        ClusterCoordinator._cluster _is_worker_failure
    tensorflow.python.distribute.coordinator.coordinator_context  get_current_dispatch_context
pipelines that are read and closed while others wait:
    tensorflow.python.data.ops.iterator_ops  OwnedIterator._create_iterator
        OwnedIterator._next_internal OwnedIterator._iterator_resource
        OwnedIterator._element_spec IteratorSpec._element_spec
pipelines whose rows are mapped by one rank:
    tensorflow.python.distribute.input_lib  DistributedDataset
        DistributedDatasetsFromFunction
    tensorflow.python.framework.op_def_registry  get
    tensorflow.python.data.util.structure  get_flat_tensor_shapes
        get_flat_tensor_types to_tensor_list from_compatible_tensor_list
    tensorflow.python.data.ops.map_op  _MapDataset._map_func _MapDataset._force_synchronous
        _MapDataset._preserve_cardinality _MapDataset._use_inter_op_parallelism
        _ParallelMapDataset._num_parallel_calls _ParallelMapDataset._deterministic
        _ParallelMapDataset._use_unbounded_threadpool
    tensorflow.python.data.ops.batch_op  _BatchDataset._batch_size
        _BatchDataset._drop_remainder _ParallelBatchDataset
    tensorflow.python.data.ops.prefetch_op  _PrefetchDataset._buffer_size
    tensorflow.python.data.ops.repeat_op  _RepeatDataset._count
    tensorflow.python.data.ops.shuffle_op  _ShuffleDataset._buffer_size
        _ShuffleDataset._reshuffle_each_iteration _ShuffleDataset._seed
        _ShuffleDataset._seed2
    tensorflow.python.ops.gen_dataset_ops  dummy_seed_generator
    tensorflow.python.data.ops.skip_op  _SkipDataset._count
    tensorflow.python.data.ops.take_op  _TakeDataset._count
    tensorflow.python.data.ops.cache_op  CacheDataset._filename
    tensorflow.python.data.ops.zip_op  _ZipDataset._datasets
    tensorflow.python.data.ops.from_tensor_slices_op  _TensorSliceDataset._tensors
    tensorflow.python.data.ops.dataset_ops  _OptionsDataset._name UnaryDataset._input_dataset
        DatasetV2._variant_tensor
    tensorflow.python.data.ops.structured_function.StructuredFunctionWrapper  function
        output_structure _func
random numbers that belong to rows:
    keras.Layer  _maybe_build
    tensorflow.python.ops.gen_random_ops  random_shuffle multinomial random_gamma random_poisson_v2
    tensorflow.python.ops.gen_stateful_random_ops  stateful_uniform
    tensorflow.python.ops.gen_stateless_random_ops  stateless_random_normal
        stateless_truncated_normal stateless_random_uniform stateless_random_uniform_int
        stateless_random_uniform_full_int stateless_multinomial stateless_random_binomial
        stateless_random_gamma_v2
    tensorflow.python.ops.gen_stateless_random_ops_v2  stateless_random_gamma_v3
    tensorflow.python.ops.gen_candidate_sampling_ops  all_candidate_sampler
        fixed_unigram_candidate_sampler log_uniform_candidate_sampler
        uniform_candidate_sampler
    tensorflow.python.eager.polymorphic_function.polymorphic_function.Function  _clone
    keras.src.backend.tensorflow.random  shuffle
steps, their losses and moments:
    tensorflow.python.autograph.core.ag_ctx  ControlStatusCtx Status.ENABLED
    tensorflow.python.eager.polymorphic_function.autograph_util  py_func_from_autograph
    tensorflow.python.eager.polymorphic_function.function_type_utils  canonicalize_function_inputs
    tensorflow.python.eager.polymorphic_function.polymorphic_function.Function  _autograph
        _default_values _is_pure _jit_compile
    keras.src.losses.loss  scale_loss_for_distribution unscale_loss_for_distribution
        reduce_weighted_values apply_mask
    keras.src.losses.losses  ops
    keras.src.backend.tensorflow.*  take _compute_moments_sync einsum
    keras.Variable  _value _path _initialize _initialize_with_initializer _map_aggregation
    keras.layers.Embedding  _embeddings
    keras.layers.BatchNormalization  _moments _reduction_axes
models:
    keras.Model  _distribute_strategy _make_function _maybe_symbolic_build _symbolic_build
        _initial_epoch _compile_loss _compile_metrics _flatten_layers _metrics
        _get_metrics_result_or_logs _resolve_auto_jit_compile
    keras.src.trainers.compile_utils  CompileLoss._user_loss CompileMetrics._user_metrics
        CompileMetrics._user_weighted_metrics
    keras.src.backend.common.masking  get_keras_mask set_keras_mask
    keras.callbacks.ModelCheckpoint  _save_model _should_save_model
    keras.src.losses.losses.LossFunctionWrapper  _fn_kwargs
    keras.metrics.MeanMetricWrapper  _fn _fn_kwargs
what `fit` reads:
    keras.Model  _loss_tracker _eval_epoch_iterator
    keras.src.trainers.epoch_iterator  EpochIterator
    keras.src.backend.tensorflow.trainer  TensorFlowTrainer
    keras.src.backend.tensorflow.trainer.TFEpochIterator  _num_batches _current_iterator
        _epoch_iterator _steps_seen _get_iterator _enumerate_iterator
        _interrupted_warning catch_stop_iteration
    keras.src.trainers.data_adapters.array_data_adapter  ArrayDataAdapter._inputs
        ArrayDataAdapter._shuffle
    keras.src.trainers.data_adapters.py_dataset_adapter  PyDatasetAdapter.py_dataset
        PyDatasetAdapter._finite_generator OrderedEnqueuer._send_py_dataset
    keras.src.trainers.data_adapters.tf_dataset_adapter  TFDatasetAdapter
optimizers:
    keras.Optimizer  _distribution_strategy _all_reduce_sum_gradients _clip_gradients
        _exclude_from_weight_decay _iterations _use_weight_decay _apply_weight_decay
        _accumulated_gradients _learning_rate _trainable_variables
        _trainable_variables_indices _var_key _backend_apply_gradients _backend_update_step
        _get_variable_index
    keras.optimizers.Adam  _momentums _velocities
    tensorflow.python.ops.gen_math_ops  unsorted_segment_sum
    tensorflow.python.ops.gen_resource_variable_ops  resource_scatter_add resource_scatter_sub
    keras.optimizers.Muon  _should_use_adamw
saving:
    keras.src.saving.saving_lib  save_model save_weights_only
    tensorflow.python.checkpoint.checkpoint  TrackableSaver.save
    keras.src.saving.keras_saveable  KerasSaveable
    keras.src.legacy.saving.legacy_h5_format  save_model_to_hdf5
    keras.src.utils.file_utils  makedirs rmtree
"""


def _read(table: str) -> dict[str, dict[str, str]]:
    needed: dict[str, dict[str, str]] = {}
    for block in re.split(r"\n(?=\S)", table.strip()):
        purpose, *places = re.split(r":?\n {4}(?=\S)", block)
        needed[purpose] = dict(re.split(r"\s+", place, maxsplit=1) for place in places)
    return needed


# {purpose: {module, class or package: names in it}}.
NEEDED = _read(_TABLE)


def check() -> None:
    """Raise VersionError if a name is missing, or Keras computes with something else."""
    import keras

    if not hasattr(keras, "backend"):  # a file or folder of the script's that has this name
        raise gone("keras.backend", "every step")
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise VersionError(
            f"Keras computes with {backend}, and dtk needs it to compute with TensorFlow. Next: "
            "set KERAS_BACKEND=tensorflow before Keras is imported"
        )
    for name, purpose in missing():
        raise gone(name, purpose)


def missing() -> list[tuple[str, str]]:
    """Return the missing names, each with its purpose."""
    return [
        (f"{where}.{name}", purpose)
        for purpose, places in NEEDED.items()
        for where, names in places.items()
        for name in names.split()
        if not _has(where, name)
    ]


def gone(name: str, purpose: str) -> VersionError:
    """Return the error for a missing name; it says what to install."""
    package = "keras" if name.startswith("keras") else "tensorflow"
    module = sys.modules.get(package)
    number = getattr(module, "__version__", None)
    if module is not None and number is None:
        at = (module.__file__ or ", ".join(module.__path__)).removesuffix("/__init__.py")
        return VersionError(
            f"{at} is imported in place of {package}, as it stands beside the script or in "
            "PYTHONPATH; rename it"
        )
    (first, end), pip = version.TESTED[package], version.requirement(package)
    return VersionError(
        f"{package} {number or 'of this version'} has no {name}, which dtk needs for {purpose}; it "
        f"was tested with {package} {first} to below {end}. Next: pip install '{pip}'"
    )


@functools.cache
def home_of(package: str, name: str) -> ModuleType:
    """Return the module of an imported package that defines a function."""
    for module in list(sys.modules.values()):
        at = getattr(module, "__name__", "")
        if at.startswith(package) and getattr(vars(module).get(name), "__module__", None) == at:
            return module
    raise LookupError(f"no module of {package} defines {name}")


def _has(where: str, name: str) -> bool:
    try:
        owner = home_of(where.removesuffix(".*"), name) if where.endswith("*") else _resolved(where)
    except (ImportError, LookupError):
        return False
    *steps, last = name.split(".")
    for step in steps:
        owner = getattr(owner, step, None)
    return hasattr(owner, last) or last in _mentioned(owner)


def _resolved(where: str) -> object:
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError:
        module, _, attribute = where.rpartition(".")
        if not module:
            raise
    try:
        return getattr(_resolved(module), attribute)
    except AttributeError as error:
        raise LookupError(where) from error


def _mentioned(owner: object) -> Iterator[str]:
    """Yield the names in the code of a class: its methods set the attributes of its objects."""
    for base in getattr(owner, "__mro__", ()):
        for member in vars(base).values():
            function = getattr(member, "fget", None) or getattr(member, "__func__", member)
            if callable(function):
                code = getattr(inspect.unwrap(function), "__code__", None)
                yield from () if code is None else code.co_names

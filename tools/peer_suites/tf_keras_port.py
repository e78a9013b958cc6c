"""Has tf_keras's tests speak Keras 3, under dtk's strategies.

`tf_keras.distribute`'s tests and what they share are loaded from the clone. Any other module of
`tf_keras` stands for the same names in Keras 3; a name that Keras 3 lacks raises when it is used.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import re
import sys
import types
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import dtk
import keras
import tensorflow as tf
from absl import flags
from tensorflow.python.distribute import combinations

import loading

# What Keras 2 writes, and the same in Keras 3.
REWRITES = (
    (r"\b(optimizer|opt)\.lr\b", r"\1.learning_rate"),
    (r"\blr=", "learning_rate="),
    (r"tf\.distribute\.(experimental\.)?MultiWorkerMirroredStrategy\(", "_port.collective("),
    (r"tf\.distribute\.(experimental\.)?ParameterServerStrategy\(", "_port.servers("),
    (r"\.reset_states\(", ".reset_state("),
    (r"(?<![\w.])(keras\.)?(losses\.)?losses(_utils)?\.Reduction(V2)?\.NONE", "'none'"),
    (
        r"(?<![\w.])(keras\.)?(losses\.)?losses(_utils)?\.Reduction(V2)?\.SUM_OVER_BATCH_SIZE",
        "'sum_over_batch_size'",
    ),
    (r"(?<![\w.])(keras\.)?(losses\.)?losses(_utils)?\.Reduction(V2)?\.SUM\b", "'sum'"),
    (r"(?<![\w.])losses_utils\.ReductionV2\.AUTO", "'mean'"),
    (r"\bfused=(True|False|fused)(,\s*|(?=\)))", ""),
    (r"\bInput\((shape=)?(\d+)([,)])", r"Input((\2,)\3"),
    (r"\bshape=\((\d+)\)", r"shape=(\1,)"),
    (r"input_shape=(\d+)([,)])", r"input_shape=(\1,)\2"),
    (r"(?<!weights)\.h5\b", ".weights.h5"),
    (r"self\.evaluate\(\[\w+\.initializer for \w+ in \w+\.variables\]\)", "pass"),
    (r"\.experimental_distribute_datasets_from_function", ".distribute_datasets_from_function"),
)
# What tf.distribute calls a strategy in a test's name, by the way that runs it.
OF_WAY = {
    "mirrored": r"MirroredCPUAndGPU|Mirrored1CPU|Mirrored2CPUs?\b|OneDeviceCPU",
    "collective": r"MultiWorkerMirrored2x1CPU",
    "servers": r"ParameterServer\dWorker2PSCPU",
}
ANY = r"Mirrored|OneDevice|ParameterServer|TPU|CentralStorage|_distribution_Default"
# Modules of `tf_keras.distribute` that tests share.
SHARED = r".*(_test|_base|_combinations)|simple_models|test_example|multi_worker_testing_utils"
_chosen = ["mirrored"]


class NotInKeras3(AttributeError):
    """A name of Keras 2 that Keras 3 has not."""


def install(clone: Path, way: str) -> None:
    """Make `tf_keras` Keras 3, and tf.distribute's strategies in tests dtk's."""
    _chosen[0] = way
    makers = {
        "mirrored_strategy_with_gpu_and_cpu": mirrored,
        "mirrored_strategy_with_one_cpu": functools.partial(mirrored, 1),
        "mirrored_strategy_with_two_cpus": mirrored,
        "mirrored_strategy_with_cpu_1_and_2": mirrored,
        "one_device_strategy": lambda: dtk.strategies.AllReduceStrategy(communicator="local"),
        "multi_worker_mirrored_2x1_cpu": collective,
        "parameter_server_strategy_1worker_2ps_cpu": servers,
        "parameter_server_strategy_3worker_2ps_cpu": servers,
    }
    for module in (tf, tf.compat.v2):
        public = module.__internal__.distribute.combinations
        for name, make in makers.items():
            setattr(public, name, combinations.NamedDistribution(str(getattr(public, name)), make))
        runner = module.__internal__.distribute.multi_process_runner
        runner.run = lambda fn, *_, args=(), kwargs=None, **__: fn(*args, **(kwargs or {}))
        runner.get_barrier = _barrier
    if way != "mirrored":  # before TensorFlow starts; servers and workers stay in here
        {"collective": collective, "servers": servers}[way]()
    else:
        mirrored()
    flags.FLAGS.mark_as_parsed()
    sys.dont_write_bytecode = True
    sys.meta_path.insert(0, _Names(clone / "tf_keras"))
    importlib.import_module("tf_keras.distribute")


def mirrored(devices: int = 2) -> Any:
    """A strategy over two devices of this process."""
    return dtk.strategies.MirroredStrategy(devices=devices)


@functools.cache  # one for all tests: ranks would have to agree on each new one
def collective(*args: Any, **kwargs: Any) -> Any:
    """The strategy of the processes of this job."""
    return dtk.strategies.AllReduceStrategy()


def _barrier() -> Any:
    return types.SimpleNamespace(wait=collective().communicator.barrier)


@functools.cache
def _servers() -> Any:
    return dtk.strategies.ParameterServerStrategy("sync")


def servers(*args: Any, **kwargs: Any) -> Any:
    """The strategy of this job's servers and workers."""
    return _servers()


def runs(name: str) -> bool:
    """Tell which tests are for this way; TensorFlow 1 and TPUs are left out."""
    if re.search(r"mode_graph|_gpu|TPU|V1_|_Default|^test_session$", name):
        return False
    named = re.search(OF_WAY[_chosen[0]], name) is not None
    return named or (re.search(ANY, name) is None)


def ported(text: str, path: str) -> str:
    """Return a file of tests for Keras 3 and dtk."""
    for old, new in REWRITES:
        text = re.sub(old, new, text)
    return re.sub(
        r"(?m)^import tensorflow.compat.v2 as tf", r"import tf_keras_port as _port\n\g<0>", text
    )


class _Names:
    """Finds modules of `tf_keras`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] != "tf_keras":
            return None
        last = name.rpartition(".")[2]
        if name.startswith("tf_keras.distribute.") and re.fullmatch(SHARED, last):
            file = self.folder / "distribute" / f"{last}.py"
            loader = loading.loader(name, file, ported)
            return importlib.util.spec_from_file_location(name, file, loader=loader)
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Stand(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []


# Where a name of Keras 2's own modules is looked for in Keras 3.
PLACES = (
    keras,
    keras.layers,
    keras.models,
    keras.optimizers,
    keras.losses,
    keras.metrics,
    keras.callbacks,
    keras.utils,
    keras.config,
    keras.backend,
)


class _Stand(ModuleType):
    """A module of Keras 2, by what Keras 3 has of it."""

    def __getattr__(self, name: str) -> Any:
        shared = self.__name__ == "tf_keras.distribute" and re.fullmatch(SHARED, name)
        if shared or re.match(r"__|pytest_|[a-z]+_module|[a-zA-Z]+Module", name):
            raise AttributeError(name)
        if name == "legacy":
            return self
        if name in GIVEN:
            return GIVEN[name]
        public: Any = keras
        for part in self.__name__.split(".")[1:]:
            public = public if part == "legacy" else getattr(public, part, public)
        for place in (public, *PLACES):
            found = getattr(place, name, None)
            if isinstance(found, ModuleType):
                return _Stand(f"{self.__name__}.{name}")
            if found is not None:
                return found
        if (name in MODULES) or name.endswith(("_v1", "_v2", "_lib", "_utils")):
            return _Stand(f"{self.__name__}.{name}")
        return _Missing(f"{self.__name__}.{name}")


class _Missing:
    """Raises once it is used, so that the rest of its file is run."""

    def __init__(self, *given: Any) -> None:
        self._given = given[0] if len(given) == 1 else f"a base class of {given[0]}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotInKeras3(f"{self._given} is not in Keras 3")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self()


def _unchanged(*args: Any, **kwargs: Any) -> Any:
    """Decorate with nothing, called with arguments or without."""
    return args[0] if args and callable(args[0]) else lambda made: made


@contextlib.contextmanager
def _policy_scope(policy: str) -> Iterator[None]:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


MODULES = (
    "legacy",
    "engine",
    "gradient_descent",
    "optimizer_v2",
    "adam",
    "rmsprop",
    "adagrad",
    "core",
)
MODULES += ("gru", "lstm", "base_layer", "base_layer_utils")
MODULES += (
    "policy",
    "base_metric",
    "adam_legacy",
    "training",
    "sequential",
    "saving",
    "experimental",
)
# What tests ask of Keras 2 that Keras 3 does by another name.
GIVEN: dict[str, Callable[..., Any]] = {
    "run_v2_only": _unchanged,
    "run_all_without_tensor_float_32": _unchanged,
    "enable_v2_dtype_behavior": _unchanged,
    "disable_mlir_bridge": _unchanged,
    "is_xla_enabled": lambda: False,
    "enable_v2_behavior": _unchanged,
    "manual_variable_initialization": _unchanged,
    "global_batch_size_supported": lambda distribution: True,
    "is_tpu_strategy": lambda strategy: False,
    "get_value": keras.ops.convert_to_numpy,
    "eval": keras.ops.convert_to_numpy,
    "set_value": lambda variable, value: variable.assign(value),
    "OptimizerV2": keras.optimizers.Optimizer,
    "policy_scope": _policy_scope,
    "global_policy": keras.config.dtype_policy,
}

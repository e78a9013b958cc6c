"""Puts `dtk.migrate.horovod` in Horovod's place, and has its tests speak Keras 3."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import dtk.migrate.horovod as hvd
import keras
import tensorflow as tf

import loading

# What tests for TensorFlow 1 and Keras 2 write, and the same in TensorFlow 2 and Keras 3.
REWRITES = (
    (r"@pytest\.mark\.skipif\(version\.parse\(tf\.__version__\) >= [^\n]*\n", ""),
    (r"self\.config = tf\.ConfigProto\(\)\n(\s*self\.config[^\n]*\n)*", "self.config = None\n"),
    (r"with self\.test_session\(config=self\.config\) as sess:", "if True:"),
    (r"K\.set_session\(sess\)", "pass"),
    (r"\blr=", "learning_rate="),
    (r"\b(opt|optimizer|new_opt)\.lr\b", r"\1.learning_rate"),
    (r"K\.get_value\(", "keras.ops.convert_to_numpy("),
    (r",\s*experimental_run_tf_function=False", ""),
    (r",\s*sample_weight_mode='temporal'", ""),
    (r",\s*input_length=\d+", ""),
    (r"losses\.(MSE|mean_squared_error)\b", "losses.MeanSquaredError()"),
    (r"\[(tf\.)?keras\.metrics\.categorical_accuracy\]", "['categorical_accuracy']"),
    (r"optimizer\.weights\b", "optimizer.variables"),
    (r"\bopt\.variables\(\)", "opt.variables"),
    (r"new_opt\.variables\(\)", "new_opt.variables"),
    (r"super\(\).__init__\(name=name, ", "super().__init__(learning_rate=0.1, name=name, "),
    (
        r"def update_step\(self, gradient, variable\)",
        "def update_step(self, gradient, variable, rate)",
    ),
    (r", fused=False", ""),
    (r"\bvar\.ref\(\)", "id(var)"),
    (r"keras\.layers\.ThresholdedReLU\(0\.5\)", "keras.layers.ReLU(threshold=0.5)"),
    (r"'temp_test_file'", "'temp_test_file.keras'"),
    (r"(?m)^(\s*)(tf_test_util\.)?run_all_in_graph_and_eager_modes\([^\n]*", r"\1pass"),
    (r"import cloudpickle\n", ""),
)


def install(clone: Path, way: str) -> None:
    """Make `horovod.tensorflow` and `horovod.keras` dtk's; the rest stays the clone's."""
    for name in ("horovod", "horovod.tensorflow", "horovod.tensorflow.keras", "horovod.keras"):
        module = sys.modules[name] = types.ModuleType(name)
        module.__path__ = [str(clone / name.partition(".tensorflow")[0].replace(".", "/"))]
        module._executing_eagerly = tf.executing_eagerly
        module.__getattr__ = hvd.__getattr__
        vars(module).update({wanted: getattr(hvd, wanted) for wanted in hvd.__all__})
        outer, _, inner = name.rpartition(".")
        if outer:
            setattr(sys.modules[outer], inner, module)
    util = sys.modules["horovod.tensorflow.util"] = types.ModuleType("horovod.tensorflow.util")
    util._executing_eagerly = tf.executing_eagerly
    sys.path += [str(clone / "test/utils"), str(clone / "test/parallel")]
    # Its own would leave the scope that `hvd.init()` has entered, with the graph that keeps it.
    tf.test.TestCase.setUp = lambda test: keras.utils.set_random_seed(1234)
    loading.install(clone / "test", ported)


def runs(name: str) -> bool:
    """Tell which tests a machine without GPUs can run."""
    return not re.search(r"_gpu|_xla|^test_session$", name)


def ported(text: str, path: str) -> str:
    """Return a file of tests for dtk."""
    for old, new in REWRITES:
        text = re.sub(old, new, text)
    return text

"""How a fenced block of the documentation is run, or which test compares it with what is printed.

A block is known by its file and the start of its first line. Python, and what programs print, need
an entry; `sh` needs none: every command that is dtk's, make's or a benchmark's is checked by that
program's own parser (`checking`), with an entry or without.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Python:
    """Executed, in a process that other blocks share.

    Attributes:
        before: Name of what `preambles` runs before it.
        after: What is run after it, to see that it did what it says.
    """

    before: str
    after: str = "pass"


@dataclasses.dataclass(frozen=True)
class Shell:
    """Executed by bash in a folder of its own, where train.py says who it is.

    Attributes:
        prints: What must be in the output.
        instead: What is put in the place of what is not here, such as other hosts.
        needs: A program it cannot do without.
        only: The start of the commands that are run; "" is the whole block, as one script.
        files: Made before, by the functions of `preambles` with these names.
    """

    prints: tuple[str, ...]
    instead: tuple[tuple[str, str], ...] = ()
    needs: str = ""
    only: str = ""
    files: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Printed:
    """What a program prints, or a script that needs more than the tests have, and its own test.

    Attributes:
        by: That test.
    """

    by: str


_PICTURE = Printed("tests/documents/test_names.py::test_what_pictures_name_is_defined_there")

ENTRIES = {
    ("CONTRIBUTING.md", "cli"): Printed(
        "tests/documents/test_blocks.py::test_the_layers_are_those_that_are_held"
    ),
    ("README.md", "[0] epoch 1/12: "): Printed("tests/test_examples.py::test_the_demo"),
    ("README.md", "import dtk  # 1"): Python(
        "nothing", after="assert len(model.history.epoch) == 3"
    ),
    ("docs/architecture.md", "a batch, on every rank"): _PICTURE,
    ("docs/architecture.md", "a gradient, on every rank"): _PICTURE,
    ("docs/architecture.md", "a metric, on every rank"): _PICTURE,
    ("docs/architecture.md", "a push"): _PICTURE,
    ("docs/architecture.md", "a checkpoint"): _PICTURE,
    ("docs/callbacks.md", "model.fit("): Python(
        "compiled",
        after="import os; assert os.path.isdir('ckpt') and len(model.history.epoch) == 30",
    ),
    ("docs/callbacks.md", "rates = dtk.schedules.polynomial_decay("): Python(
        "plain", after="model.fit(x, y, verbose=0); assert model.optimizer.iterations.numpy() > 0"
    ),
    ("docs/callbacks.md", "if strategy.is_chief:"): Printed(
        "tests/callbacks/test_trackers.py::test_two_ranks_and_a_restart_are_one_run_of_each"
    ),
    ("docs/command-line.md", "mpirun -np 4 -H node1:2,node2:2 "): Shell(
        ("worker 0 of 4", "worker 3 of 4"),
        instead=(("node1:2,node2:2", "localhost:4"),),
        needs="mpirun",
    ),
    ("docs/command-line.md", "export TF_CONFIG="): Shell(("worker 1 of 2",)),
    ("docs/command-line.md", "$ mpirun -np 2 dtk doctor"): Printed(
        "tests/documents/test_blocks.py::test_what_doctor_says_under_mpirun"
    ),
    ("docs/command-line.md", "hosts = "): Printed(
        "tests/launch/test_job_file.py::test_config_asks_and_writes_what_the_documentation_shows"
    ),
    ("docs/command-line.md", "$ echo 'eval"): Printed(
        "tests/cli/test_main.py::test_bash_completes_what_the_documented_line_has_set_up"
    ),
    ("docs/command-line.md", "dtk bench --model resnet20 --json"): Shell(
        ("Use ",), only="dtk plan", files=("benchmark",)
    ),
    ("docs/data.md", "dtk.data.describe("): Python("digits"),
    ("docs/data.md", "data: arrays of 1000 rows"): Printed(
        "tests/documents/test_blocks.py::test_what_describe_prints"
    ),
    ("docs/engines/ray.md", "import ray.train"): Printed(
        "tests/engines/test_ray.py::test_what_the_page_shows"
    ),
    ("docs/engines/ray.md", "shard = "): Printed(
        "tests/engines/test_ray.py::test_every_row_of_uneven_shards_counts_once"
    ),
    ("docs/engines/ray.md", "from ray import tune"): Printed(
        "tests/engines/test_ray.py::test_what_the_page_shows"
    ),
    ("docs/engines/kubernetes.md", "dtk: rank 1: waiting for"): Printed(
        "tests/engines/test_kubernetes.py::test_without_the_service_each_pod_says_whom_it_misses"
    ),
    ("docs/engines/spark.md", "import dtk.engines.spark"): Printed(
        "tests/engines/test_spark.py::test_what_the_documentation_shows"
    ),
    ("docs/inference.md", "rows = np.lib.format"): Python(
        "compiled", after="assert predictions[500:510].shape == (10, 1)"
    ),
    ("docs/inference.md", "print(dtk.inference.quantize"): Python("compiled"),
    ("docs/inference.md", "dtk.inference.export(model"): Python("compiled and rows"),
    ("docs/model-parallel.md", "strategy = "): Python(
        "plain", after="assert len(model.layers) == 10"
    ),
    ("docs/model-parallel.md", "front = "): Python(
        "plain", after="assert model.output_shape == (None, 10)"
    ),
    ("docs/model-parallel.md", "x = keras.Input((64,))"): Python(
        "plain", after="assert y.shape == (None, 64)"
    ),
    ("docs/model-parallel.md", "x = keras.Input((33, 20, 3))"): Python(
        "plain", after="assert y.shape == (None, 8, 4, 8)"
    ),
    ("docs/model-parallel.md", "model = dtk.layers.convert"): Python("plain"),
    ("docs/parameter-servers.md", "dtk run -n 4 --ps 2 train.py"): Shell(
        ("chief 0 of 5", "worker 4 of 5", "ps 0 of 5", "ps 1 of 5")
    ),
    ("docs/search.md", "import dtk, keras, optuna"): Python(
        "searched", after="del dtk.search.optimize; assert len(study.trials) == 2"
    ),
    ("docs/search.md", "backend = "): Python(
        "grouped",
        after="import os; del dtk.search.optimize; assert os.path.isfile('study.journal')",
    ),
    ("docs/strategies.md", "import dtk"): Python(
        "data",
        after="assert int(optimizer.iterations) == 4 and np.isfinite(float(loss))",
    ),
    ("docs/strategies.md", "strategy = "): Python(
        "plain", after="assert strategy.size == 1"
    ),
    ("docs/tutorials/horovod.md", "import keras"): Python(
        "data",
        after="assert len(model.history.epoch) == 2\n"
        "hvd.shutdown(); hvd.job._job.made = None  # other tests share the process",
    ),
    ("docs/tutorials/horovod.md", "dtk run -n 2"): Shell(("worker 0 of 2", "worker 1 of 2")),
    ("docs/tutorials/two-machines.md", "import dtk"): Python("data", after="assert here.rank == 0"),
    ("docs/tutorials/two-machines.md", "dtk run --hosts"): Shell(
        ("worker 0 of 2", "worker 1 of 2"), instead=(("node1:1,node2:1", "localhost:2"),)
    ),
    ("docs/tutorials/two-machines.md", "dtk run --config job.toml train"): Shell(
        ("worker 0 of 2", "worker 1 of 2")
    ),
    ("docs/tutorials/two-machines.md", "dtk run --config job.toml --max"): Shell(
        ("worker 0 of 2", "worker 1 of 2")
    ),
    ("docs/tutorials/notebook.md", "import dtk"): Python(
        "data", after="assert len(history['loss']) == 3 and weights[0].shape == (8, 1)"
    ),
    ("docs/trust.md", "dtk: self-test of model"): Printed(
        "tests/trainer/test_self_test.py::test_what_it_prints"
    ),
}

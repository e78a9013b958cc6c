"""What is done with each fenced block of the documentation. A block without an entry fails.

A block is known by its file and the start of its first line. Whatever its entry, every command in
it that is dtk's, make's or a benchmark's is checked by that program's own parser (`checking`).
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Python:
    """Executed, in a process that other blocks share.

    Attributes:
        before: Name of what `preambles` runs before it.
        after: What is run after it, to see that it did what it says.
        columns: Whether it is two programs, beside each other.
    """

    before: str
    after: str = "pass"
    columns: bool = False


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
class Parsed:
    """Not executed: only its syntax, and what `checking` knows of its commands.

    Attributes:
        because: Why.
        by: Tests that run the same, smaller or in parts.
    """

    because: str
    by: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Printed:
    """What a program prints, and the test that compares it with what it prints.

    Attributes:
        by: That test.
    """

    by: str


_MEASURES = "measures for minutes, on a machine of its own"

ENTRIES = {
    ("README.md", "make demo "): Parsed(
        "installs dtk, and tests all of it",
        by=(
            "tests/test_examples.py::test_the_demo",
            "tests/test_makefile.py::test_packages_are_installed_where_that_is_allowed",
        ),
    ),
    ("README.md", "git clone "): Parsed(
        "installs dtk",
        by=("tests/test_makefile.py::test_packages_are_installed_where_that_is_allowed",),
    ),
    ("README.md", "dtk run --hosts node1:1,"): Parsed(
        "needs four hosts",
        by=(
            "tests/launch/test_ssh.py::test_ranks_on_two_hosts_reach_each_other",
            "tests/cluster/test_slurm.py::test_every_rank_of_a_step_derives_the_same_addresses",
        ),
    ),
    ("README.md", "[0] epoch 1/12: "): Printed("tests/test_examples.py::test_the_demo"),
    ("README.md", "import keras   "): Python(
        "data", after="assert len(model.history.epoch) == 30", columns=True
    ),
    ("docs/callbacks.md", "model.fit("): Python(
        "compiled",
        after="import os; assert os.path.isdir('ckpt') and len(model.history.epoch) == 30",
    ),
    ("docs/command-line.md", "mpirun -np 4 -H node1:2,node2:2 "): Shell(
        ("worker 0 of 4", "worker 3 of 4"),
        instead=(("node1:2,node2:2", "localhost:4"),),
        needs="mpirun",
    ),
    ("docs/command-line.md", "dtk run --hosts node1:2,node2:2 --max-restarts"): Parsed(
        "needs other hosts, of which one is lost",
        by=(
            "tests/launch/test_attempts.py::test_a_job_goes_on_without_a_lost_host",
            "tests/launch/test_attempts.py::"
            "test_training_that_was_killed_twice_ends_with_the_same_weights",
        ),
    ),
    ("docs/command-line.md", "              ┌──"): Printed(
        "tests/launch/test_attempts.py::test_any_history_keeps_the_bounds"
    ),
    ("docs/command-line.md", "#!/bin/sh"): Parsed(
        "needs Slurm",
        by=("tests/cluster/test_slurm_jobs.py::test_a_job_that_is_requeued_resumes",),
    ),
    ("docs/command-line.md", "#!/bin/bash"): Parsed(
        "needs Slurm",
        by=("tests/cluster/test_slurm_jobs.py::test_srun_trains_what_one_process_does",),
    ),
    ("docs/command-line.md", "export TF_CONFIG="): Shell(("worker 1 of 2",)),
    ("docs/command-line.md", "$ mpirun -np 2 dtk doctor"): Printed(
        "tests/documents/test_blocks.py::test_what_doctor_says_under_mpirun"
    ),
    ("docs/data.md", "dtk.data.describe("): Python("digits"),
    ("docs/inference.md", "rows = np.lib.format"): Python(
        "compiled", after="assert predictions[500:510].shape == (10, 1)"
    ),
    ("docs/inference.md", "print(dtk.inference.quantize"): Python("compiled"),
    ("docs/inference.md", "dtk.inference.export(model"): Python("compiled and rows"),
    ("docs/data.md", "data: arrays of 1000 rows"): Printed(
        "tests/documents/test_blocks.py::test_what_describe_prints"
    ),
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
    ("docs/command-line.md", "dtk bench   "): Parsed(
        f"{_MEASURES}; some need other hosts, or install PyTorch",
        by=(
            "tests/cli/test_bench.py::test_every_turn_of_every_rank_is_saved",
            "tests/cli/test_bench_hosts.py"
            "::test_peers_train_on_several_hosts_and_one_that_is_not_there_is_named",
        ),
    ),
    ("docs/command-line.md", "dtk bench --model resnet20 --json"): Shell(
        ("Use ",), only="dtk plan", files=("benchmark",)
    ),
    ("docs/callbacks.md", "rates = dtk.schedules.polynomial_decay("): Python(
        "plain", after="model.fit(x, y, verbose=0); assert model.optimizer.iterations.numpy() > 0"
    ),
    ("docs/parameter-servers.md", "dtk run -n 4 --ps 2 train.py"): Shell(
        ("chief 0 of 5", "worker 4 of 5", "ps 0 of 5", "ps 1 of 5")
    ),
    ("CONTRIBUTING.md", "git clone "): Parsed(
        "installs dtk, and tests all of it",
        by=("tests/test_makefile.py::test_packages_are_installed_where_that_is_allowed",),
    ),
    ("CONTRIBUTING.md", "cli"): Printed(
        "tests/documents/test_blocks.py::test_the_layers_are_those_that_are_held"
    ),
    ("docs/strategies.md", "import dtk"): Python(
        "data",
        after="assert int(optimizer.iterations) == 4 and np.isfinite(float(loss))",
    ),
    ("docs/search.md", "import dtk, keras, optuna"): Python(
        "searched", after="del dtk.search.optimize; assert len(study.trials) == 2"
    ),
    ("docs/search.md", "with dtk.search.groups("): Python(
        "grouped",
        after="import os; del dtk.search.optimize; assert os.path.isfile('study.journal')",
    ),
    ("docs/trust.md", "dtk: self-test of model"): Printed(
        "tests/strategies/test_self_test.py::test_what_it_prints"
    ),
    ("docs/trust.md", "dtk check train.py"): Parsed(
        "needs a script that trains, which train.py is not here",
        by=("tests/cli/test_check.py::test_a_step_that_adds_up",),
    ),
    ("docs/architecture.md", "a batch, on every rank"): Printed(
        "tests/documents/test_names.py::test_what_pictures_name_is_defined_there"
    ),
    ("docs/architecture.md", "a gradient, on every rank"): Printed(
        "tests/documents/test_names.py::test_what_pictures_name_is_defined_there"
    ),
    ("docs/architecture.md", "a push"): Printed(
        "tests/documents/test_names.py::test_what_pictures_name_is_defined_there"
    ),
    ("docs/architecture.md", "a checkpoint"): Printed(
        "tests/documents/test_names.py::test_what_pictures_name_is_defined_there"
    ),
    ("docs/command-line.md", "dtk tune train.py"): Parsed(
        "measures the script many times",
        by=(
            "tests/cli/test_tune.py::test_a_real_script_is_timed_and_trains_nothing",
            "tests/cli/test_tune.py::test_forgetting",
        ),
    ),
    ("docs/command-line.md", "dtk check train.py"): Parsed(
        "needs a script that trains, which train.py is not here",
        by=("tests/cli/test_check.py::test_a_step_that_adds_up",),
    ),
    ("docs/keras-tests.md", "git clone "): Parsed(
        "downloads Keras's repository, and runs its tests for an hour",
        by=("tests/strategies/test_cases.py::test_the_same_as_one_process",),
    ),
    ("docs/costs.md", "python benchmarks/costs "): Parsed(
        _MEASURES, by=("tests/test_benchmarks.py::test_costs_prints_a_table_for_each_row",)
    ),
    ("docs/networks.md", "dtk run -n 4 examples/cifar10/train.py --model resnet20"): Parsed(
        "trains for hours",
        by=(
            "tests/test_examples.py::test_cifar10_on_synthetic_images_saves_and_resumes",
            "tests/test_examples.py::test_cifar10_with_less_to_send",
        ),
    ),
    ("docs/networks.md", "python benchmarks/cntk_table.py "): Parsed(
        "trains for hours",
        by=("tests/test_benchmarks.py::test_cntks_table_trains_what_is_missing",),
    ),
    ("docs/networks.md", "dtk run -n 2 examples/dcgan.py "): Parsed(
        "trains for minutes",
        by=("tests/test_examples.py::test_a_dcgan_on_two_workers_is_that_of_one",),
    ),
    ("docs/performance.md", "dtk bench --model resnet20 --model mlp "): Parsed(
        f"{_MEASURES}, and installs PyTorch and others",
        by=("tests/cli/test_bench.py::test_every_turn_of_every_rank_is_saved",),
    ),
    ("docs/performance.md", "export ONEDNN_MAX_CPU_ISA=AVX2 "): Parsed(
        f"{_MEASURES}, and installs PyTorch and others",
        by=("tests/cli/test_bench.py::test_every_turn_of_every_rank_is_saved",),
    ),
    ("docs/plan.md", "dtk bench -n 2 --model resnet20 "): Shell(
        ("Use ",), only="dtk plan", files=("benchmark",)
    ),
    ("docs/plan.md", "dtk bench --model resnet20 --exchange none "): Parsed(
        "as the block above, for another model",
        by=(
            "tests/cli/test_planning.py::test_another_model_is_planned_with_what_a_benchmark_found"
            "_of_sending",
        ),
    ),
    ("docs/plan.md", "dtk plan --model model.keras "): Parsed(
        "measures a model of one's own",
        by=(
            "tests/cli/test_plan_model.py::test_a_saved_model_on_hosts_is_planned_with_their_links",
            "tests/planning/test_model_graph.py::test_layers_are_measured_once_at_the_shapes_of_a_rank",
        ),
    ),
    ("docs/plan.md", "plan = dtk.planning.load_plan"): Python(
        before="planned", after="model.compile('sgd', 'mse'); model.predict(x, verbose=0)"
    ),
}

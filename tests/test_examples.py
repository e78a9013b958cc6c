"""Every command that README.md and the examples print runs, and ends with what it promises."""

import ast
import importlib.util
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from dtk import quiet

from support.blocks import all_blocks, missing_lines
from support.world import missing

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
DTK_RUN = [sys.executable, "-m", "dtk.cli.main", "run", "-n", "2"]
PYTHON = [sys.executable]
# what the test suite sets for itself
OWN = ("TF_CPP_MIN_LOG_LEVEL", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")

# By script: what makes it short, appended to its commands as printed, and what it prints at last.
# `--data` and `--synthetic` stand in for images that must be downloaded.
SMALLER = {
    "custom_loop.py": ("--epochs 2", r"test accuracy \S+ with"),
    "dcgan.py": ("--data digits --images 32 --epochs 1 --batch-size 16", r"worker\(s\)"),
    "digits.py": ("--epochs 2", r"test accuracy \S+, norm of all weights"),
    "digits_allreduce.py": ("--epochs 2", r"largest relative difference"),
    "digits_horovod_mpirun.py": ("--epochs 2", r"with 2 worker\(s\) over horovod"),
    "digits_mirrored.py": ("--epochs 2", r"test accuracy \S+ on \d devices"),
    "digits_parameter_server.py": ("--epochs 2", r"worker 1: \d+ steps, pulled \d+ and pushed \d+"),
    "digits_showcase.py": ("--epochs 2", r"FinalTest: accuracy"),
    "distill_digits.py": ("--epochs 2 --calls 3", r"distilled, in 8 bits"),
    "embedding_parameter_server.py": ("--epochs 1 --buckets 400000", r"a step moved 0\.\d+ MB"),
    "export_digits.py": ("--epochs 2 --calls 3", r"2 of 3 layers with weights quantised"),
    "linear_regression_ps.py": ("--steps 200", r"objective / scikit-learn's \d"),
    "mobilenet_inference.py": (
        "--synthetic --images 64 --test-images 32 --weights none --calls 3",
        r"LiteRT int8 weights",
    ),
    "model_parallel.py": ("--epochs 1", r"a step sends \S+ kB"),
    "pipeline_mlp.py": ("--epochs 1", r"norm of all weights"),
    "predict_to_disk.py": ("--rows 20000 --epochs 1", r"process in 100 rows: (0e|\de-0)"),
    "ray_digits.py": ("--epochs 4", r"test accuracy \S+ with 2 workers of Ray"),
    "spark_digits.py": ("--epochs 2", r"accuracy \S+ on 2 ranks of Spark"),
    "search_digits.py": ("--epochs 2 --trials 2", r"validation accuracy \S+ with"),
    "spatial_unet.py": ("--images 8 --epochs 1", r"test loss \S+,"),
    "train.py": ("--data digits --images 64 --epochs 1 --test-at-end", r"test accuracy"),
    "vgg16_channel_parallel.py": ("--data digits --steps 2 --batch-size 8", r": loss \S+,"),
}
# Spark's own words, and what its executors have printed, each line behind its rank.
_OF_SPARK = re.compile(
    r"\[\d\] |\d\d/\d\d/\d\d \S+ WARN |WARNING: Using incubator modules|Using Spark's default log4j"
    r"|Setting default log level|To adjust logging level"
)

pytestmark = [
    pytest.mark.command,
    pytest.mark.skipif(
        importlib.util.find_spec("sklearn") is None, reason="scikit-learn is not installed"
    ),
]


def run(launcher, script, *arguments, code=0, folder=None, **environ):
    """Run a script as a user would; returns its standard output."""
    env = {name: value for name, value in os.environ.items() if name not in OWN}
    done = subprocess.run(
        [*launcher, str(ROOT / script), *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        env={**env, **environ},
        cwd=folder,
    )
    assert done.returncode == code, done.stdout + done.stderr
    if code == 0:
        said = done.stderr.splitlines()
        if launcher[:4] != DTK_RUN[:4]:  # elsewhere TensorFlow's import says what it always says
            said = [line for line in said if not quiet.is_noise(line, "2", gpu=False)]
        said = [line for line in said if not _OF_SPARK.match(line)]
        assert not said, "an example leaves nothing on the screen that must be ignored"
        return done.stdout
    return done.stdout + done.stderr


def numbers(pattern, text):
    found = [float(number) for number in re.findall(pattern, text)]
    assert found, f"no {pattern!r} in:\n{text}"
    return found


def printed_commands():
    """The commands of README's table of examples, and of the docstrings, without their comments."""
    readme = (ROOT / "README.md").read_text()
    found = re.findall(r"^\|.*\| `([^`]*examples/\S+\.py[^`]*)` \|$", readme, re.MULTILINE)
    for script in sorted(EXAMPLES.rglob("*.py")):
        said = ast.get_docstring(ast.parse(script.read_text())) or ""
        lines = [line.partition("   #")[0].strip() for line in said.splitlines()]
        found += [line for line in lines if "examples/" in line and ".py" in line]
    return list(dict.fromkeys(found))


def script_of(command):
    (script,) = re.findall(r"examples/(?:\w+/)*(\w+\.py)", command)
    return script


def test_each_script_says_how_it_is_run():
    run = {script_of(command) for command in printed_commands()}
    parts = {path.name for path in (EXAMPLES / "cifar10").glob("*.py")} - {*SMALLER}
    assert run == {*SMALLER} == {path.name for path in EXAMPLES.rglob("*.py")} - parts


@pytest.mark.full
@pytest.mark.parametrize("command", printed_commands())
def test_a_printed_command_runs(command, tmp_path):
    """Breaks as `dcgan.py`, which ended in a refusal where it ran as README started it."""
    smaller, promised = SMALLER[script_of(command)]
    program, *words = [*shlex.split(command), *shlex.split(smaller)]
    if program == "mpirun" and (reason := missing("horovod-mpi")):
        pytest.skip(reason)
    if command.startswith("python examples/spark") and (reason := missing("spark")):
        pytest.skip(reason)
    as_root = ["--allow-run-as-root", "--oversubscribe"]  # which root needs, and two cores
    ways = {
        "dtk": [sys.executable, "-m", "dtk.cli.main"],
        "python": [sys.executable],
        "mpirun": ["mpirun", *as_root],
    }
    words = [sys.executable if word == "python" else word for word in words]
    at = next(index for index, word in enumerate(words) if word.startswith("examples/"))
    launcher = [*ways[program], *words[:at]]
    here = {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    printed = run(launcher, words[at], *words[at + 1 :], folder=tmp_path, **here)
    assert re.search(promised, printed), printed
    assert not re.search(r"\bnan\b", printed), printed


@pytest.mark.full
@pytest.mark.parametrize(
    "script, options, pattern, relative",
    [
        ("custom_loop.py", "--epochs=6", r"(?:loss|accuracy) (\d\S+)", 0),
        ("model_parallel.py", "--epochs=2", r"loss (\d\S+)", 1e-4),
        ("pipeline_mlp.py", "--epochs=2", r"norm of all weights (\S+)", 1e-5),
        ("spatial_unet.py", "--images=32 --epochs=2", r"test loss (\S+),", 1e-3),
        (
            "cifar10/vgg16_channel_parallel.py",
            "--data=digits --steps=3 --batch-size=8 --units=64",
            r": loss (\S+),",
            1e-3,
        ),
    ],
)
def test_two_processes_end_as_one(script, options, pattern, relative):
    one, two = (
        numbers(pattern, run(launcher, f"examples/{script}", *options.split()))
        for launcher in (PYTHON, DTK_RUN)
    )
    assert one == pytest.approx(two, rel=relative)


@pytest.mark.full("test_equivalence.py has its equality, README.md its own look of what is printed")
def test_the_demo():
    out = run(DTK_RUN, "examples/digits_allreduce.py", "--epochs=8", "--width=32")
    assert numbers(r"largest relative difference (\S+)", out)[0] <= 1e-5
    assert numbers(r"test accuracy +\S+ +(\S+)", out)[0] > 0.8
    assert "2 worker" in out
    (shown,) = (one.text for one in all_blocks() if one.text.startswith("[0] epoch 1/12"))
    assert missing_lines(shown, out) == [], "README.md shows something else"


@pytest.mark.full
def test_the_showcase_sends_bits_after_its_warm_start_and_goes_on_from_its_checkpoint(tmp_path):
    script, place = "examples/digits_showcase.py", f"--checkpoints={tmp_path / 'saved'}"
    out = run(DTK_RUN, script, place, "--epochs=3")
    sent = re.search(r"a step sent (\S+) kB at first, and (\S+) kB in the end", out)
    assert sent and float(sent[2]) < float(sent[1]) / 15
    out = run(DTK_RUN, script, place, "--epochs=6")
    assert "resuming at epoch 4/6" in out
    # The last batch has 41 of the 1257 rows. The minibatch once grew and the rate per sample fell.
    cuts, mu = out.count("(cut "), math.exp(-41 / 256)
    ((per_sample,), (momentum,), (rate,), (accuracy,)) = (
        numbers(pattern, out)
        for pattern in (
            r"(\S+) per sample:",
            r"momentum (\S+) in the end",
            r"per sample: rate (\S+),",
            r"FinalTest: accuracy (\S+),",
        )
    )
    assert per_sample in [pytest.approx(0.02 / 2**made, rel=1e-3) for made in range(cuts, 7)]
    assert momentum == pytest.approx(mu, abs=1e-4)
    assert rate == pytest.approx(per_sample * 41 * (1 - mu), rel=2e-3)
    assert accuracy > 0.93


@pytest.mark.full
@pytest.mark.parametrize(
    "script, options, said",
    [
        ("cifar10/train.py", "", "CIFAR-10 is not on this machine"),
        (
            "mobilenet_inference.py",
            "--synthetic --images=256 --test-images=32 --weights=imagenet",
            "MobileNet's weights are not on this machine",
        ),
    ],
)
def test_what_cannot_be_downloaded_is_told(script, options, said, tmp_path):
    # no way out, but for gRPC between the ranks
    dead_end = {"https_proxy": "http://127.0.0.1:9", "no_grpc_proxy": "127.0.0.1,localhost"}
    script, environ = f"examples/{script}", {"KERAS_HOME": str(tmp_path), **dead_end}
    out = run(DTK_RUN, script, *options.split(), code=1, **environ)
    assert said in out
    assert "Traceback" not in out


BROKEN = "docs/broken/what_breaks.py"


@pytest.mark.full
@pytest.mark.parametrize(
    ("launcher", "case", "code", "said"),
    [
        (DTK_RUN, "multi-worker", 1, "Attempt to convert a value \\(PerReplica"),
        (PYTHON, "parameter-server", 1, "ClusterCoordinator.create_per_worker_dataset"),
        (PYTHON, "mirrored", 0, "differ by \\d+e-0[678]"),
        (PYTHON, "mirrored-clip", 0, "differ by \\de([+]00|-01)"),
        (PYTHON, "mirrored-tail", 0, "differ by \\de-0[123]"),
        (PYTHON, "mirrored-accumulation", 1, "merge_call"),
        (PYTHON, "mirrored-executions", 1, "InvalidArgumentError"),
        (PYTHON, "mirrored-outside", 1, "AssertionError:"),
        (PYTHON, "keras-distribution", 0, "computed as\n64 rows"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.islower() else "",
)
def test_what_the_readme_says_is_broken_still_is(launcher, case, code, said):
    assert re.search(said, run(launcher, BROKEN, case, code=code))


@pytest.mark.full
def test_what_the_readme_says_of_horovod_still_holds():
    """Its optimizer reports success and sends nothing, so that each rank trains by itself."""
    if reason := missing("horovod-gloo"):
        pytest.skip(reason)
    launcher = [*DTK_RUN, "--communicator", "horovod"]
    assert run(launcher, BROKEN, "horovod-callbacks").count("AttributeError") == 6
    out = run(launcher, BROKEN, "horovod")
    assert "its timeline holds 0 all-reduces" in out, "fixed upstream: see docs/migrating.md"
    assert len(set(re.findall(r"first weight (\S+)", out))) == 2

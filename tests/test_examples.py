"""Every example runs as its first lines say, on real data, and ends with what it promises."""

import importlib.util
import json
import math
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from dtk import quiet

from documents.blocks import all_blocks, missing_lines
from world import missing

ROOT = Path(__file__).resolve().parents[1]
DTK_RUN = [sys.executable, "-m", "dtk.cli.main", "run", "-n", "2"]
PYTHON = [sys.executable]
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2"]
MPIRUN += [sys.executable]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None, reason="scikit-learn is not installed"
)


def run(launcher, script, *arguments, code=0, timeout=150, **environ):
    """Run an example as a user would; returns its standard output."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    # what the test suite sets for itself
    for name in ("TF_CPP_MIN_LOG_LEVEL", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
        env.pop(name, None)
    done = subprocess.run(
        [*launcher, str(ROOT / script), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=env,
    )
    assert done.returncode == code, done.stdout + done.stderr
    if code == 0:
        said = done.stderr.splitlines()
        if launcher[:4] != DTK_RUN[:4]:  # elsewhere TensorFlow's import says what it always says
            said = [line for line in said if not quiet.is_noise(line, "2", gpu=False)]
        assert not said, "an example leaves nothing on the screen that must be ignored"
        return done.stdout
    return done.stdout + done.stderr


def number(pattern, text):
    found = re.search(pattern, text)
    assert found, f"no {pattern!r} in:\n{text}"
    return float(found[1])


def test_the_showcase_sends_bits_after_its_warm_start_and_goes_on_from_its_checkpoint(tmp_path):
    script, place = "examples/digits_showcase.py", f"--checkpoints={tmp_path / 'saved'}"
    out = run(DTK_RUN, script, place, "--epochs=3")
    sent = re.search(r"a step sent (\S+) kB at first, and (\S+) kB in the end", out)
    assert sent and float(sent[2]) < float(sent[1]) / 15
    out = run(DTK_RUN, script, place, "--epochs=6")
    assert "resuming at epoch 4/6" in out
    # The last batch has 41 of the 1257 rows. The minibatch once grew and the rate per sample fell.
    cuts, mu = out.count("(cut "), math.exp(-41 / 256)
    per_sample = number(r"(\S+) per sample:", out)
    assert per_sample in [pytest.approx(0.02 / 2**made, rel=1e-3) for made in range(cuts, 7)]
    assert number(r"momentum (\S+) in the end", out) == pytest.approx(mu, abs=1e-4)
    assert number(r"per sample: rate (\S+),", out) == pytest.approx(
        per_sample * 41 * (1 - mu), rel=2e-3
    )
    assert number(r"FinalTest: accuracy (\S+),", out) > 0.93


@pytest.mark.parametrize("consistency", ["async", "sync"])
def test_parameter_servers(consistency):
    script = "examples/digits_parameter_server.py"
    out = run([*DTK_RUN, "--ps", "2"], script, "--epochs=4", f"--consistency={consistency}")
    assert number(r"test accuracy (\S+)", out) > 0.8
    assert "after 92 steps" in out, "4 epochs of ceil(1437 / 64) steps"
    assert re.search(r"worker 1: \d+ steps, pulled 116 and pushed 116 kB", out)


def test_a_large_table_travels_by_rows():
    script = "examples/embedding_parameter_server.py"
    out = run([*DTK_RUN, "--ps", "2"], script, "--buckets=400000")
    assert number(r"test accuracy (\S+)", out) > 0.85
    assert number(r"a step moved (\S+) MB", out) < 0.01 * number(r"the table has (\S+) MB", out)
    held = re.search(r"2 servers hold (\S+) and (\S+) kB", out).groups()
    assert all(float(kilobytes) > 12_000 for kilobytes in held), "the table is on one server"


def test_block_updates_end_where_scikit_learn_does():
    more = ("--tau=2", "--blocks=4", "--l1=1000", "--steps=600")
    out = run([*DTK_RUN, "--ps", "2"], "examples/linear_regression_ps.py", *more)
    assert number(r"objective / scikit-learn's (\S+)", out) < 1.0005
    assert number(r"(\d+) of 65 weights are not zero", out) < 25
    objectives = [float(found) for found in re.findall(r"objective (\d+)\n", out)]
    assert len(objectives) == 7 and objectives == sorted(objectives, reverse=True)
    assert number(r"at most (\d) steps", out) in (1, 2)
    assert "130 of 520 bytes for each" in out, "a quarter of the weights"


@pytest.mark.parametrize(("launcher", "workers"), [(DTK_RUN, 2), (PYTHON, 1)], ids=["2", "1"])
def test_the_demo(launcher, workers):
    out = run(launcher, "examples/digits_allreduce.py", "--epochs=8", "--width=32")
    assert number(r"largest relative difference (\S+)", out) <= 1e-5
    assert number(r"test accuracy +\S+ +(\S+)", out) > 0.8
    assert f"{workers} worker" in out
    assert number(r"images per second +\S+ +(\S+)", out) > 0
    if workers == 2:
        (shown,) = (one.text for one in all_blocks() if one.text.startswith("[0] epoch 1/12"))
        assert missing_lines(shown, out) == [], "README.md shows something else"


def test_horovod_under_mpirun():
    if reason := missing("horovod-mpi"):
        pytest.skip(reason)
    assert shutil.which("mpirun")
    out = run(MPIRUN, "examples/digits_horovod_mpirun.py", "--epochs=6")
    assert number(r"test accuracy (\S+) with 2 worker\(s\) over horovod", out) > 0.9
    assert out.count("test accuracy") == 1
    assert "2 workers, global batch 128 (64 per worker), learning rate 0.02 -> 0.04" in out


def test_two_devices_of_one_process():
    out = run(PYTHON, "examples/digits_mirrored.py", "--epochs=6")
    assert number(r"test accuracy (\S+) on 2 devices", out) > 0.9


def test_a_custom_loop_gives_the_same_numbers_with_two_workers_as_with_one():
    one = run(PYTHON, "examples/custom_loop.py", "--epochs=6")
    two = run(DTK_RUN, "examples/custom_loop.py", "--epochs=6")
    losses = [re.findall(r"loss (\S+)", out) for out in (one, two)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 6
    accuracies = [number(r"test accuracy (\S+) with", out) for out in (one, two)]
    assert accuracies[0] == accuracies[1] > 0.9


def test_a_model_in_parts_gives_the_same_numbers_as_a_whole():
    one = run(PYTHON, "examples/model_parallel.py", "--epochs=2")
    two = run(DTK_RUN, "examples/model_parallel.py", "--epochs=2")
    losses = [[float(n) for n in re.findall(r"loss (\S+)", out)] for out in (one, two)]
    assert len(losses[0]) == 2
    assert losses[0] == pytest.approx(losses[1], abs=2e-4)
    here, whole = re.search(r"(\d+) of (\d+) weights are here", two).groups()
    assert int(here) < 0.6 * int(whole)
    assert number(r"a step sends (\S+) kB", two) > 0 == number(r"a step sends (\S+) kB", one)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_stages_on_two_ranks_end_as_in_one_process(schedule):
    options = ("--epochs=2", f"--schedule={schedule}")
    one, two = (
        run(launcher, "examples/pipeline_mlp.py", *options) for launcher in (PYTHON, DTK_RUN)
    )
    norms = [number(r"norm of all weights (\S+)", out) for out in (one, two)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    held = [int(n) for n in re.findall(r"holds (\d+) of", two)]
    assert sum(held) == int(re.search(r"of (\d+) weights", two)[1]) and min(held) > 0


def test_a_unet_by_rows_ends_as_one_of_whole_images():
    options = ("--images=32", "--epochs=2")
    script = "examples/spatial_unet.py"
    one, two = (run(launcher, script, *options) for launcher in (PYTHON, DTK_RUN))
    for what in (r"epoch 2/2: loss (\S+)", r"test loss (\S+),"):
        assert number(what, two) == pytest.approx(number(what, one), rel=1e-3)
    assert "2 rank(s) for an image" in two


def test_vgg16_by_channels_ends_as_a_whole_one():
    options = ("--data=digits", "--steps=3", "--batch-size=8", "--units=64")
    script = "examples/cifar10/vgg16_channel_parallel.py"
    one, two = (run(launcher, script, *options) for launcher in (PYTHON, DTK_RUN))
    assert number(r": loss (\S+),", two) == pytest.approx(number(r": loss (\S+),", one), rel=1e-3)
    held = [number(r"rank 0 holds (\S+) M", out) for out in (one, two)]
    assert held[1] < 0.52 * held[0]


def test_a_search_is_resumed_and_drawn(tmp_path):
    script, picture = "examples/search_digits.py", tmp_path / "study.png"
    kept = (f"--study={tmp_path / 'study.journal'}", f"--plot={picture}", "--epochs=3")
    out = run(DTK_RUN, script, *kept, "--trials=2")
    assert out.count("complete after 3 epochs") == 2 and "2 worker(s)" in out
    out = run(PYTHON, script, *kept, "--trials=4")
    assert [int(n) for n in re.findall(r"^trial (\d+): rate", out, re.MULTILINE)] == [2, 3]
    assert number(r"validation accuracy (\S+) with", out) > 0.5
    width, height = struct.unpack(">II", picture.read_bytes()[16:24])
    assert (width, height) == (1200, 1350), "three pictures below each other"


CIFAR10 = "examples/cifar10/train.py"
# no way out, but for gRPC between the ranks
DEAD_END = {"https_proxy": "http://127.0.0.1:9", "no_grpc_proxy": "127.0.0.1,localhost"}


def test_cifar10_without_the_data_says_what_to_do(tmp_path):
    out = run(DTK_RUN, CIFAR10, code=1, KERAS_HOME=str(tmp_path), **DEAD_END)
    assert "CIFAR-10 is not on this machine" in out
    assert "cifar-10-batches-py-target.tar.gz" in out
    assert "--synthetic" in out and "--data digits" in out
    assert "Traceback" not in out


def test_cifar10_on_synthetic_images_saves_and_resumes(tmp_path):
    small = ("--synthetic", "--images=64", "--batch-per-worker=16", "--warmup-epochs=1")
    saving = ("--checkpoints", str(tmp_path / "checkpoints"))
    out = run(DTK_RUN, CIFAR10, *small, *saving, "--epochs=1")
    assert "the error means nothing" in out
    rates = re.search(r"2 workers, .*learning rate (\S+) -> (\S+) over 1 epoch", out)
    assert rates and float(rates[2]) == pytest.approx(2 * float(rates[1]), rel=1e-4)
    assert "resnet20: test accuracy" in out
    out = run(DTK_RUN, CIFAR10, *small, *saving, "--epochs=2")
    assert "resuming at epoch 2/2" in out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--exchange=1bit", "--warm-start=64"], r"WarmStart\(exchange=Quantized\(bits=1\)"),
        (["--block-momentum=128"], r"BlockMomentum\(block_size=128"),
    ],
    ids=["1bit", "blocks"],
)
def test_cifar10_with_less_to_send(options, said, tmp_path):
    small = ("--model=convnet", "--data=digits", "--images=256", "--epochs=2", "--test-at-end")
    file = tmp_path / "result.json"
    out = run(DTK_RUN, CIFAR10, *small, *options, f"--result={file}")
    assert re.search(rf"digits .* \(not CIFAR-10\); 2 worker\(s\), {said}", out)
    found = json.loads(file.read_text())
    assert (found["workers"], found["batch_size"], len(found["images_per_second"])) == (2, 64, 2)
    assert found["bytes_per_step"] < 0.6 * 4 * 1_195_594, "whole gradients were sent"


def test_cifar10_under_mpirun():
    if reason := missing("horovod-mpi"):
        pytest.skip(reason)
    small = ("--model=convnet", "--synthetic", "--images=64", "--epochs=1", "--test-at-end")
    out = run(MPIRUN, CIFAR10, *small)
    assert "convnet: test accuracy" in out and "2 worker(s)" in out


def test_a_dcgan_on_two_workers_is_that_of_one(tmp_path):
    import h5py
    import numpy as np

    small = ("--data=digits", "--images=48", "--batch-size=16", "--width=16", "--epochs=1")
    weights, shown = {}, {}
    for workers, launcher in ((1, PYTHON), (2, DTK_RUN)):
        folder = tmp_path / str(workers)
        file = tmp_path / f"{workers}.weights.h5"
        out = run(launcher, "examples/dcgan.py", *small, f"--output={folder}", f"--weights={file}")
        assert f"{workers} worker(s)" in out
        shown[workers] = (folder / "epoch-0001.png").read_bytes()
        found = []
        with h5py.File(file) as saved:
            saved.visititems(
                lambda name, item, found=found: (
                    found.append(item[()].ravel())
                    if isinstance(item, h5py.Dataset) and "/layers/" in name
                    else None
                )
            )
        weights[workers] = np.concatenate(found)
    assert weights[1].size > 30_000
    difference = np.linalg.norm(weights[1] - weights[2]) / np.linalg.norm(weights[1])
    assert difference < 1e-4
    assert all(png.startswith(b"\x89PNG") for png in shown.values())


def rows_of(out):
    """Tables of the examples of inference: name -> accuracy, kB on disk, latency."""
    found = re.findall(r"^\[0\] (\S.*?) +([01]\.\d{4})\b.* (\d+\.\d)   (\S+) ms \(", out, re.M)
    return {name: tuple(map(float, numbers)) for name, *numbers in found}


def test_exports_of_the_digits():
    out = run(DTK_RUN, "examples/export_digits.py", "--epochs=8", "--calls=5", timeout=280)
    rows = rows_of(out)
    accuracy, size, _ = rows["Keras float32"]
    assert accuracy > 0.9
    assert all(abs(other - accuracy) < 0.01 for other, _, _ in rows.values())
    assert {"SavedModel float32", "LiteRT float32", "LiteRT int8 weights", "Keras int8"} < {*rows}
    assert rows["LiteRT int8 weights"][1] < 0.3 * rows["LiteRT float32"][1] < 0.3 * size
    assert "2 of 3 layers with weights quantised" in out


def test_distilled_digits():
    script, few = "examples/distill_digits.py", ("--epochs=10", "--calls=5")
    rows = rows_of(run(DTK_RUN, script, *few, timeout=280))
    assert rows["teacher"][0] > 0.95 and rows["distilled"][0] > 0.65
    assert rows["distilled"][1] < 0.05 * rows["teacher"][1]
    assert abs(rows["distilled, in 8 bits"][0] - rows["distilled"][0]) < 0.01


def test_predictions_on_disk_and_once_more(tmp_path):
    more = ("--rows=20000", "--epochs=3", "--directory", str(tmp_path))
    out = run(DTK_RUN, "examples/predict_to_disk.py", *more)
    assert number(r"accuracy (\S+),", out) > 0.7
    assert number(r"largest difference from one process in 100 rows: (\S+)", out) < 1e-6
    files = number(r"0 files were there; now (\d+) hold 20000 rows", out)
    assert files >= 16
    (tmp_path / "predictions/output/part-00003.npy").unlink()
    again = run(DTK_RUN, "examples/predict_to_disk.py", *more)
    assert f"{files - 1:.0f} files were there; now {files:.0f} hold 20000 rows" in again


def test_mobilenet_on_synthetic_images_and_without_the_data(tmp_path):
    script, small = "examples/mobilenet_inference.py", ("--images=256", "--test-images=32")
    rows = rows_of(run(DTK_RUN, script, "--synthetic", *small, "--calls=3", timeout=280))
    assert rows["LiteRT int8 weights"][1] < 0.4 * rows["LiteRT float32"][1]
    dead_end = {"https_proxy": "http://127.0.0.1:9", "no_grpc_proxy": "127.0.0.1,localhost"}
    environ = {"KERAS_HOME": str(tmp_path), **dead_end}
    out = run(DTK_RUN, script, code=1, **environ)
    assert "CIFAR-10 is not on this machine" in out and "--synthetic" in out
    out = run(DTK_RUN, script, "--synthetic", *small, "--weights=imagenet", code=1, **environ)
    assert "MobileNet's weights are not on this machine" in out and "~/.keras/models" in out
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
def test_what_the_readme_says_of_horovods_callbacks_still_holds():
    if reason := missing("horovod-gloo"):
        pytest.skip(reason)
    launcher = [*DTK_RUN, "--communicator", "horovod"]
    out = run(launcher, BROKEN, "horovod-callbacks")
    assert out.count("AttributeError") == 6

"""Predictions on disk: every row once and in order, whoever wrote it, whoever was killed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtk
from dtk.communicators import LocalCommunicator
from dtk.errors import DisagreementError, NotDistributedError
from dtk.inference import predict_to_disk, read
from dtk.inference.predict_to_disk import source_of

from inference import bodies
from support import bodies as worlds

ROOT = Path(__file__).resolve().parents[2]
TWO = pytest.mark.parametrize("backend, size", [("collective", 2)])
ALONE = LocalCommunicator()


@pytest.fixture(scope="module")
def plain():
    return bodies.plain()


def assert_same(found, wanted, atol=1e-6):
    keras.tree.assert_same_structure(found, wanted)
    for mine, theirs in zip(keras.tree.flatten(found), keras.tree.flatten(wanted), strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_allclose(mine, theirs, 0, atol)


class Batches(keras.utils.PyDataset):
    """Remembers which it was asked for."""

    def __init__(self):
        super().__init__()
        self.x, self.asked = bodies.data(), []

    def __len__(self):
        return -(-bodies.ROWS // bodies.BATCH)

    def __getitem__(self, index):
        self.asked.append(index)
        rows = slice(index * bodies.BATCH, (index + 1) * bodies.BATCH)
        x = {name: array[rows] for name, array in self.x.items()}
        return x, np.zeros(len(x["extra"])), np.ones(len(x["extra"]))


def data_of(kind):
    """The same rows in every form, and what else `predict_to_disk` is told."""
    if kind == "arrays":
        return bodies.data(), {"batch_size": bodies.BATCH}
    if kind == "memory map":
        return {n: array.view(np.memmap) for n, array in bodies.data().items()}, {"batch_size": 8}
    if kind == "function":
        return Batches().__getitem__, {"steps": len(Batches())}
    if kind == "py dataset":
        return Batches(), {}
    rows = tf.data.Dataset.from_tensor_slices(bodies.data())
    if kind == "dataset of unknown length":
        rows = rows.filter(lambda x: True)
    return rows.batch(bodies.BATCH), {}


# The same on every rank.


def on_every_rank(folder):
    """Each kind of data, into files of two batches; which files are whose."""
    strategy = worlds.strategy()
    with strategy.scope():
        model = bodies.model()
    written = {}
    for kind in ("arrays", "py dataset", "dataset of unknown length"):
        data, more = data_of(kind)
        place = Path(folder, kind)
        files, write = [], dtk.inference.part_files.PartFiles.write
        dtk.inference.part_files.PartFiles.write = lambda self, part, *more, w=write, f=files: (
            f.append(part),
            w(self, part, *more),
        )
        try:
            found = predict_to_disk(model, data, place, rows_per_file=2 * bodies.BATCH, **more)
        finally:
            dtk.inference.part_files.PartFiles.write = write
        assert len(found) == bodies.ROWS
        asked = sorted(set(data.asked)) if kind == "py dataset" else []
        written[kind] = files, asked
    assert len(predict_to_disk(model, data, place)) == bodies.ROWS, "it was all there"
    collective = model.predict(bodies.data(), batch_size=bodies.BATCH, verbose=0)
    assert_same(found[:], collective)
    return written


@TWO
def test_two_ranks_write_what_one_process_predicts(world, backend, size, tmp_path, plain):
    first, second = world(backend, size).run(on_every_rank, str(tmp_path))
    kinds = list(first)
    for kind in kinds:
        assert_same(read(tmp_path / kind)[:], plain)
    # blocks of neighbours, and of a stream every second part
    assert [part for part, _ in (first["arrays"], second["arrays"])] == [
        [*range(7)], [*range(7, 13)],
    ]  # fmt: skip
    assert first["dataset of unknown length"][0] == [*range(0, 13, 2)]
    # but for the few that tell the data from others
    assert set(first["py dataset"][1]) == {*range(14), 13, 25}
    assert set(second["py dataset"][1]) == {0, 13, *range(14, 26)}


def with_others_data(folder):
    """What is said where ranks have other rows, other weights, or another order."""
    strategy = worlds.strategy()
    with strategy.scope():
        model, other = bodies.model(), bodies.model(seed=3 + strategy.rank)
    x = bodies.data()
    mine = {**x, "extra": x["extra"] + strategy.rank}
    shuffled = tf.data.Dataset.from_tensor_slices(mine).batch(8)
    said = []
    for model_, data in ((model, mine), (other, x), (model, shuffled)):
        with pytest.raises(DisagreementError) as raised:
            predict_to_disk(model_, data, folder)
        said.append(str(raised.value))
    # first batches alike, a later one not
    late = tf.data.Dataset.from_tensor_slices({**x, "extra": np.concatenate(
        [x["extra"][:150], x["extra"][150:] + strategy.rank])}).batch(8)  # fmt: skip
    with pytest.raises(DisagreementError) as raised:
        predict_to_disk(model, late, folder)
    with pytest.raises(ValueError, match="not complete: "):
        read(folder)
    # rank 0 alone finds out, and all raise
    with pytest.raises(ValueError, match="of another kind of data") as refused:
        predict_to_disk(model, x, folder)
    said += [str(raised.value), "\n".join([str(refused.value), *refused.value.__notes__])
             if strategy.rank else ""]  # fmt: skip
    plain = bodies.model()
    return [*said, len(predict_to_disk(plain, x, f"{folder}/other", strategy=strategy))]


@pytest.mark.full("a cheaper test holds its rule")
@TWO
def test_ranks_that_differ_are_told_so(world, backend, size, tmp_path):
    for rank, said in enumerate(world(backend, size).run(with_others_data, str(tmp_path))):
        rows, weights, shuffled, late, refused, count = said
        assert "data to predict (hash of some batches)" in rows
        assert "model's weights (their hash)" in weights
        assert "reshuffle_each_iteration=False" in shuffled
        assert "batches that were read" in late
        assert "rank 1: this happened on rank 0" in refused or rank == 0
        assert count == bodies.ROWS


def by_all_replicas(folder):
    """One process writes, and its devices, or the workers behind it, compute."""
    served = os.environ["DTK_TEST_COMMUNICATOR"] == "served"
    strategy = worlds.served() if served else worlds.strategy(devices=2)
    with strategy.scope():
        model = bodies.model()
    found = predict_to_disk(model, bodies.data(), folder, batch_size=bodies.BATCH)
    if served:
        with pytest.raises(NotImplementedError, match="in a job without them"):
            dtk.inference.quantize(model)
    return keras.tree.map_structure(np.asarray, found[:])


@pytest.mark.full("a cheaper test holds its rule")
@pytest.mark.parametrize("backend, size", [("local", 1), ("served", 2)])
def test_devices_and_workers_of_one_process_compute(world, backend, size, tmp_path, plain):
    (found,) = world(backend, size).run(by_all_replicas, str(tmp_path))
    assert_same(found, plain)


# Killed, and resumed.


def whole_parts(folder):
    files = [*folder.rglob("part-*.npy")]
    return {str(file.relative_to(folder)): file.stat().st_mtime_ns for file in files}


@pytest.mark.full("a cheaper test holds its rule")
@pytest.mark.command
def test_a_killed_job_is_resumed_by_another_number_of_ranks(tmp_path, plain):
    """Rank 1 is killed half-way; what it and rank 0 have written stays, bit for bit."""
    script = ROOT / "tests/inference/killed_job.py"
    command = [sys.executable, "-m", "dtk.cli.main", "run", "-n", "2"]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "DTK_CALIBRATE": "0"}
    # three batches tell the data from others, and one what comes out; then six are predicted
    job = subprocess.run(
        [*command, str(script), str(tmp_path), "10"],
        capture_output=True, text=True, timeout=120, env=env,
    )  # fmt: skip
    assert job.returncode != 0, job.stdout + job.stderr
    assert "rank 1" in job.stdout + job.stderr and "SIGKILL" in job.stdout + job.stderr
    with pytest.raises(ValueError, match=r"not complete: \d+ parts"):
        read(tmp_path)
    before = whole_parts(tmp_path)
    second = {name for name in before if int(re.search(r"part-(\d+)", name)[1]) >= 13}
    assert len(second) == 6 * 4, "rank 1 has written six parts of three outputs, with digests"
    assert json.loads((tmp_path / "manifest.json").read_text())["parts"] is None
    (tmp_path / "output.logits/.writing-1-part-00025.npy").write_bytes(b"half")
    batches = Batches()
    found = predict_to_disk(
        bodies.model(), batches.__getitem__, tmp_path, steps=26, strategy=ALONE, rows_per_file=8
    )
    assert_same(found[:], plain)
    after = whole_parts(tmp_path)
    assert {name: after[name] for name in before} == before, "a complete part was made again"
    assert set(batches.asked) == set(range(26)), "what is kept is compared with its data"
    assert not [*tmp_path.rglob(".writing-*")]


# In one process.


def assert_bits(folder, other):
    names = sorted(str(file.relative_to(folder)) for file in folder.rglob("part-*.npy"))
    assert names
    for name in names:
        assert (folder / name).read_bytes() == (other / name).read_bytes()


@pytest.mark.full_but("arrays")
@pytest.mark.parametrize("kind", ["arrays", "memory map", "function", "dataset"])
def test_whatever_the_data_is_the_bits_are_the_same(kind, tmp_path, plain):
    model = bodies.model()
    for place, kind_ in ((tmp_path / "one", "py dataset"), (tmp_path / "two", kind)):
        data, more = data_of(kind_)
        found = predict_to_disk(model, data, place, rows_per_file=64, **more)
    assert_same(found[:], plain)
    assert_bits(tmp_path / "one", tmp_path / "two")


def test_parts_that_are_gone_or_cut_are_made_again(tmp_path, plain):
    model, x = bodies.model(), bodies.data()
    predict_to_disk(model, x, tmp_path, batch_size=8, rows_per_file=20)
    before = whole_parts(tmp_path)
    assert len(before) == 9 * 4, "20 rows are three batches of 8"
    cut = tmp_path / "output.logits/part-00002.npy"
    gone = tmp_path / "output.parts.1/part-00004.npy"
    cut.write_bytes(cut.read_bytes()[:-8])
    gone.unlink()
    assert_same(predict_to_disk(model, x, tmp_path, batch_size=8)[:], plain)
    after = whole_parts(tmp_path)
    changed = {name[-9:-4] for name in after if after[name] != before.get(name)}
    assert changed == {"00002", "00004"}


def test_a_stream_that_has_grown_is_not_taken_for_predicted(tmp_path):
    def rows(count):
        data = {name: array[:count] for name, array in bodies.data().items()}
        return tf.data.Dataset.from_tensor_slices(data).filter(lambda x: True).batch(8)

    model = bodies.model()
    predict_to_disk(model, rows(60), tmp_path, rows_per_file=16)
    with pytest.raises(ValueError, match="of other data .*batches 6 to 7 has changed"):
        predict_to_disk(model, rows(100), tmp_path)
    assert len(predict_to_disk(model, rows(100), tmp_path, resume=False)) == 100


def test_another_plan_is_refused_and_removed_when_asked(tmp_path):
    model, x = bodies.model(), bodies.data()

    def again(model=model, x=x, batch_size=8, rows_per_file=16, **more):
        more = {"batch_size": batch_size, "rows_per_file": rows_per_file, **more}
        return predict_to_disk(model, x, tmp_path, **more)

    again()
    for more, what in (
        ({"model": bodies.model(seed=4)}, "of other weights"),
        ({"x": {**x, "extra": x["extra"][::-1]}}, "of other data"),
        ({"x": {name: array[:200] for name, array in x.items()}}, "of another number of rows"),
        ({"batch_size": 16}, "in batches of another size|of another number of batches"),
        ({"rows_per_file": 40}, "in files of another size"),
        ({"x": Batches(), "batch_size": None}, "of another kind of data"),
    ):
        with pytest.raises(ValueError, match=what) as refused:
            again(**more)
        assert str(tmp_path) in str(refused.value) and "resume=False" in str(refused.value)
    other = bodies.model(seed=4)
    again(other, resume=False)
    assert_same(again(other)[:], bodies.plain(4))
    (tmp_path / "manifest.json").write_text('{"format": 7}')
    with pytest.raises(ValueError, match="is not what predict_to_disk writes"):
        again()


def test_a_row_that_has_changed_is_found_wherever_it_is(tmp_path):
    """Breaks as the row of before, in batches that nothing had looked at."""
    model, x = bodies.model(), bodies.data()

    def again(row):
        changed = np.where(np.arange(bodies.ROWS)[:, None] == row, 5, x["extra"])
        return predict_to_disk(model, {**x, "extra": changed}, tmp_path, batch_size=8)

    again(None)
    with pytest.raises(ValueError, match=r"of other data \(a row of batches 3 to 5 has changed"):
        again(37)
    (tmp_path / "output.logits/part-00008.npy").unlink()  # the others stay, and are compared
    with pytest.raises(ValueError, match="resume=False"):
        again(37)
    assert len(again(None)) == bodies.ROWS


def test_a_model_that_computes_otherwise_is_another(tmp_path):
    """Breaks as what the model of before has predicted."""
    x = np.ones((10, 3), "float32")

    one, other = (
        keras.Sequential([keras.Input((3,)), keras.layers.Rescaling(scale)]) for scale in (1, 2)
    )
    assert predict_to_disk(one, x, tmp_path)[0].tolist() == [1.0] * 3
    assert predict_to_disk(one, x, tmp_path)[0].tolist() == [1.0] * 3
    with pytest.raises(ValueError, match="of a model of other layers"):
        predict_to_disk(other, x, tmp_path)


class Named(keras.Model):
    """Returns outputs whose names would be one on a disk."""

    def call(self, x):
        return {"a/b": x, "a_b": x + 1, "A_b": x + 2, "c": {"d": x + 3}, "c.d": x + 4}


def test_outputs_of_like_names_are_kept_apart(tmp_path):
    """Breaks as an output that is read back in place of another."""
    model, x = Named(), np.ones((10, 3), "float32")
    model.built = True
    for _ in range(2):
        assert_same(predict_to_disk(model, x, tmp_path)[:], model(x))


def test_a_directory_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    for resume in (True, False):
        with pytest.raises(ValueError, match="holds files and no predictions"):
            predict_to_disk(bodies.model(), bodies.data(), tmp_path, resume=resume)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(FileNotFoundError, match="manifest.json is not there"):
        read(tmp_path)


class Odd(keras.Model):
    """Returns what files of rows cannot hold."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.built = kind, True

    def call(self, x):
        if self.kind == "scalar":
            return tf.reduce_sum(x)
        if self.kind == "ragged":
            return tf.RaggedTensor.from_tensor(x)
        if self.kind == "rows":
            return x, x[:1]
        if self.kind == "strings":
            return tf.strings.as_string(x)
        return x[:-1] if self.kind == "fewer" else x


@pytest.mark.parametrize(
    "kind, said",
    [
        ("scalar", "output of a batch is a scalar"),
        ("ragged", r"to_tensor\(\)"),
        ("rows", "different numbers of rows"),
        ("strings", "no number"),
        ("fewer", "rows that were predicted, and the data has 10"),
    ],
)
def test_outputs_that_are_no_rows_are_refused(kind, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        predict_to_disk(Odd(kind), np.ones((10, 3), "float32"), tmp_path, batch_size=5)


def test_rows_of_another_shape_are_refused(tmp_path):
    batches = [np.ones((2, 3 + index // 3), "float32") for index in range(4)]
    with pytest.raises(ValueError, match=r"shape \(4,\) in part \d, and \(3,\)"):
        predict_to_disk(Odd("itself"), batches.__getitem__, tmp_path, steps=4)


@pytest.mark.parametrize(
    "data, more, said",
    [
        (np.ones((0, 3)), {}, r"\[0\] rows"),
        ({"a": np.ones((2, 3)), "b": np.ones((3, 3))}, {}, r"\[2, 3\] rows"),
        ([1.0, 2.0], {}, "made of float"),
        (np.ones((2, 3)), {"steps": 1}, "knows its own number"),
        (np.ones((2, 3)), {"batch_size": 0}, "batch_size=0"),
        (lambda index: np.ones((2, 3)), {}, "give steps="),
        (range(4), {}, "batch"),
        (range(0, 4, 2), {"repeated": True}, "no end"),
        (range(0, 4, 2), {"batch_size": 2}, "leave batch_size out"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_data_that_cannot_be_predicted_is_refused(data, more, said):
    if isinstance(data, range):  # made here: ranks that import this module must not compute
        made = tf.data.Dataset.range(4)
        made = made if data.step == 1 else made.batch(data.step)
        data = made.repeat() if more.pop("repeated", False) else made
    with pytest.raises((ValueError, TypeError), match=said):
        source_of(data, **more)


def test_a_model_without_weights_or_ranks_is_refused(tmp_path, monkeypatch):
    model = keras.Sequential([keras.layers.Dense(2)])
    with pytest.raises(ValueError, match="has no weights yet"):
        predict_to_disk(model, np.ones((2, 3)), tmp_path)
    monkeypatch.setenv("TF_CONFIG", json.dumps(
        {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}
    ))  # fmt: skip
    with pytest.raises(NotDistributedError, match=r"rank 1: .*Give strategy="):
        predict_to_disk(bodies.model(), bodies.data(), tmp_path)
    with pytest.raises(TypeError, match="dtk.auto_strategy"):
        predict_to_disk(bodies.model(), bodies.data(), tmp_path, strategy="mirrored")


def test_rows_are_read_as_one_array(tmp_path):
    x = np.arange(46, dtype="float32").reshape(23, 2)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Rescaling(2.0)])
    rows = predict_to_disk(model, x, tmp_path, batch_size=3, rows_per_file=6)
    wanted = 2 * x
    for index in (
        0, -1, 22, slice(None), slice(5, 19), slice(4, 7), slice(20, 5), slice(None, None, -3),
        [3, 22, -1, 3], np.arange(23) % 2 == 0,
    ):  # fmt: skip
        np.testing.assert_array_equal(rows[index], wanted[index])
    assert len(rows) == 23 and rows.outputs.shape == (23, 2)
    np.testing.assert_array_equal(np.asarray(rows.outputs), wanted)
    np.testing.assert_array_equal(np.concatenate([*rows.batches(5)]), wanted)
    assert rows[[]].shape == (0, 2) and rows[[[3, 4]]].shape == (1, 2, 2)
    for wrong in (23, -24, np.ones(5, bool)):
        with pytest.raises(IndexError, match="23"):
            rows[wrong]
    with pytest.raises(ValueError, match="size=0"):
        next(rows.batches(0))


@pytest.mark.full("a cheaper test holds its rule")
def test_half_precision_is_kept(tmp_path):
    """Breaks as a dtype that `.npy` has no name for."""
    for dtype, stored in (("float16", "float16"), ("bfloat16", "float32")):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, dtype=dtype)])
        x = np.ones((5, 2), "float32")
        rows = predict_to_disk(model, x, tmp_path / dtype)
        assert rows.outputs.dtype == stored
        np.testing.assert_array_equal(rows[:], keras.ops.cast(model(x), "float32"))

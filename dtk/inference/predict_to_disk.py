"""Predictions of data larger than memory: every rank writes its own files, and a run may go on.

    part                0      1      2      3      4      5
    rank 0 of 2        [wrote][wrote][wrote]
    rank 1 of 2                            [wrote] killed
    later, of 3 ranks                              [rank 0][rank 1]

Ranks meet when they begin and when all is written, and never in between: a slow rank stops nobody.

data                                        a batch is                      a rank reads
arrays, memory maps, structures of them     `batch_size` rows               its own batches alone
a keras.utils.PyDataset                     what `data[index]` returns      its own batches alone
a function of an index, and `steps`         what `data(index)` returns      its own batches alone
a tf.data.Dataset of batches                an element                      all, and skips most

A part is some successive batches, and one file of each output. Its batches are cut in one way
whatever the number of ranks, so that a row is always computed in the same company.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TypeAlias

import keras
import numpy as np
import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.communicators.root import on_root
from dtk.compat import tf_datasets
from dtk.compat.keras_data import as_tensors
from dtk.errors import at_rank
from dtk.even_division import even_sizes
from dtk.inference.part_files import Manifest, PartFiles, Predictions, outputs_of
from dtk.inference.weights import check_ready, ranks_of, strategy_of
from dtk.input import digests, slicing
from dtk.nests import Array, Leaf, Tree
from dtk.strategies.dtk_strategy import DtkStrategy
from dtk.trainer import model_files
from dtk.trainer.ranks.rank_checks import compare

# Whatever can be predicted to disk.
Data: TypeAlias = "Tree | Array | tf.data.Dataset | keras.utils.PyDataset | Callable[[int], Tree]"
# The parts that a rank predicts: number -> batches.
Parts: TypeAlias = "Iterator[tuple[int, Iterator[Tree]]]"
# Whether the part of a number is to be read.
Asked: TypeAlias = "Callable[[int], bool]"

# Batch size of arrays when nothing is said, as Keras's.
_BATCH_SIZE = 32


class IndexedSource:
    """Batches that are read by their index, in any order."""

    read = None  # ranks read apart

    def __init__(
        self,
        kind: str,
        steps: int,
        batch: Callable[[int], Tree],
        batch_size: int | None = None,
        rows: int | None = None,
    ):
        self.kind, self.steps, self.rows, self.batch_size = kind, steps, rows, batch_size
        self.batch = lambda index: as_tensors(batch(index))

    def first(self) -> Tree:
        return self.batch(0)

    def digest(self) -> int:
        """Return a digest of the first batch, one in the middle, and the last."""
        number = tf.constant(0, tf.int64)
        for index in sorted({0, self.steps // 2, self.steps - 1}):
            number = digests.add(number, digests.digest(_inputs(self.batch(index))))
        return int(number)

    def parts_of(self, rank: int, size: int, is_asked: Asked, per_part: int) -> Parts:
        """Read a block of the parts that are asked for: neighbours, so that a disk reads on."""
        asked = [part for part in range(-(-self.steps // per_part)) if is_asked(part)]
        sizes = even_sizes(len(asked), size)
        first = sum(sizes[:rank])
        for part in asked[first : first + sizes[rank]]:
            indices = range(part * per_part, min((part + 1) * per_part, self.steps))
            yield part, map(self.batch, indices)


class StreamSource:
    """Batches of a `tf.data.Dataset`, which every rank reads from the first to the last."""

    kind, batch_size, rows = "dataset", None, None

    def __init__(self, dataset: tf.data.Dataset):
        self._dataset = dataset
        count = int(dataset.cardinality())
        self.steps = count if count >= 0 else None  # None where only reading tells
        # batches that `parts_of` has read, their rows, and their digest
        self.read = (0, 0, 0)

    def first(self) -> Tree:
        return next(iter(self._dataset))

    def digest(self) -> int:
        """Return a digest of the first batch."""
        return int(digests.digest(_inputs(self.first())))

    def parts_of(self, rank: int, size: int, is_asked: Asked, per_part: int) -> Parts:
        """Read everything, and yield every `size`-th of the parts that are asked for."""
        turn = 0
        for part, group in itertools.groupby(self._observed(), lambda each: each[0] // per_part):
            if is_asked(part):
                if turn % size == rank:
                    yield part, (batch for _, batch in group)
                turn += 1

    def _observed(self) -> Iterator[tuple[int, Tree]]:
        digest, rows = tf.constant(0, tf.int64), 0
        for number, batch in enumerate(self._dataset):
            inputs = _inputs(batch)
            batch_digest = digests.digest_of(tf.constant(number, tf.int64), inputs)
            digest = digests.add(digest, batch_digest)
            rows += int(slicing.count_rows(inputs))
            self.read = number + 1, rows, int(digest)
            yield number, batch


# Batches in a fixed order, the same on every rank and in every run.
Source: TypeAlias = IndexedSource | StreamSource


def _inputs(batch: Tree) -> Tree:
    """Return what a batch is predicted from: targets and weights may change."""
    return keras.utils.unpack_x_y_sample_weight(batch)[0]


def source_of(data: Data, batch_size: int | None = None, steps: int | None = None) -> Source:
    """Return the batches of any data that can be predicted to disk."""
    kind = type(data).__name__
    is_function = callable(data) and not isinstance(data, keras.utils.PyDataset)
    has_batches = is_function or isinstance(data, tf.data.Dataset | keras.utils.PyDataset)
    if has_batches and batch_size is not None:
        raise ValueError(
            f"batch_size={batch_size} with a {kind}, which has batches of its own; leave "
            "batch_size out, and make its batches of that size"
        )
    if steps is not None and not is_function:
        raise ValueError(
            f"steps={steps} belongs to a function from an index to a batch; a {kind} knows its own "
            "number"
        )
    if tf_datasets.is_of_this_rank(data):
        raise ValueError(
            "a dataset of dtk.data.shard holds this rank's own rows; give every rank the whole "
            "dataset, or file names by a function: predict_to_disk divides the work itself"
        )
    if isinstance(data, tf.data.Dataset):
        if int(data.cardinality()) in (0, tf.data.INFINITE_CARDINALITY):
            what = "no batch to predict" if int(data.cardinality()) == 0 else "no end"
            raise ValueError(
                f"the dataset has {what}; check what it is made of, leave out repeat(), or end it "
                "with take(steps)"
            )
        slicing.check_rows(data.element_spec)
        return StreamSource(data)
    if isinstance(data, keras.utils.PyDataset):
        kind, batch, steps = "PyDataset", data.__getitem__, data.num_batches
    elif callable(data):
        kind, batch = "function", data
    else:
        return _of_arrays(data, _BATCH_SIZE if batch_size is None else batch_size)
    if steps is None or steps < 1:
        raise ValueError(
            f"a {kind} of steps={steps} batches; give steps=... of 1 or more for a function, and a "
            "PyDataset whose __len__ is a number"
        )
    return IndexedSource(kind, steps, batch)


def _of_arrays(arrays: Tree | Array, batch_size: int) -> IndexedSource:
    leaves = tf.nest.flatten(arrays)
    if not leaves or not all(hasattr(leaf, "shape") and len(leaf.shape) for leaf in leaves):
        names = sorted({type(leaf).__name__ for leaf in leaves})
        raise TypeError(
            f"data to predict is made of {', '.join(names) or 'nothing'}; give arrays with rows "
            "(or a structure of them), a tf.data.Dataset of batches, a keras.utils.PyDataset, or a "
            "function from an index to a batch"
        )
    counts = [int(leaf.shape[0]) for leaf in leaves]
    if len(set(counts)) > 1 or counts[0] == 0 or batch_size < 1:
        raise ValueError(
            f"the arrays to predict have {counts} rows, and batch_size={batch_size}; give all of "
            "them the same number of rows, 1 or more, and batches of 1 or more"
        )

    def batch(index: int) -> Tree:
        rows = slice(index * batch_size, (index + 1) * batch_size)
        return (tf.nest.map_structure(lambda leaf: leaf[rows], arrays),)

    return IndexedSource("arrays", -(-counts[0] // batch_size), batch, batch_size, counts[0])


# A file of a part is no larger than this, unless one batch is.
_BYTES = 64 * 2**20
# Each rank writes at least so many files, where there are batches enough: what is lost with a
# killed rank is one of them.
_PARTS_PER_RANK = 8
_SAME_DATA = (
    "give every rank all of the data, in the same order each time it is read: predict_to_disk "
    "divides the work itself (a shuffled dataset takes shuffle(..., reshuffle_each_iteration=False)"
    " and a seed)"
)
# The fields of a plan: what ranks compare, and what it means that an earlier run's is another. The
# rest of a plan follows from these.
_FIELDS = {
    "weights": ("model's weights (their hash)", "of other weights"),
    "kind": ("kind of data to predict", "of another kind of data"),
    "rows": ("rows to predict", "of another number of rows"),
    "steps": ("batches to predict", "of another number of batches"),
    "data": ("data to predict (hash of some batches)", "of other data"),
    "batch_size": ("size of their batches", "in batches of another size"),
    "per_part": ("batches of a file", "in files of another size"),
}


def predict_to_disk(
    model: keras.Model,
    data: Data,
    directory: str | os.PathLike[str],
    *,
    batch_size: int | None = None,
    steps: int | None = None,
    rows_per_file: int | None = None,
    strategy: DtkStrategy | Communicator | None = None,
    resume: bool = True,
) -> Predictions:
    """Predict every row of some data into files, each rank its share. Every rank calls this.

    Row i of the result is what one process predicts of row i. A batch is cut in the same way by any
    number of ranks, so the files of two runs on the same kind of processor hold the same bits; rows
    are within 1e-6 of `model.predict`, which may cut its batches otherwise.

    A run that was killed is started again with the same arguments, by any number of ranks: it keeps
    the files that are complete and makes the others. It reads all of the data, to compare it with
    what the files were made from. The code of your own layers is not compared.

    Args:
        model: A built model, compiled or not, under a strategy or not.
        data: Arrays with rows, memory maps among them, or a structure of such arrays, as `x` of
            `Model.predict`; or what has batches: a `keras.utils.PyDataset`, a function from an
            index to a batch, or a `tf.data.Dataset` of batches. Batches are what `Model.predict`
            takes: inputs, alone or in a tuple with targets and weights. A rank reads only its own
            rows, but of a `tf.data.Dataset` everything, and computes its own.
        directory: A directory that all ranks see; made where it is missing.
        batch_size: Rows of a batch of arrays, on one rank; 32 if None.
        steps: Number of batches, of a function.
        rows_per_file: Rows of a file, rounded up to whole batches, and held in memory; None takes
            files of 64 MiB or less, eight or more for each rank. For what has batches of its own,
            their number is found from the rows of the first one.
        strategy: The ranks; None takes the model's own.
        resume: Whether to keep what an earlier run has predicted; else it is removed first.

    Returns:
        The predictions, as `read` returns them, on every rank.

    Raises:
        ValueError: The directory holds predictions of another model or data, or something else; the
            data cannot be predicted; or rank 0 does not see what others wrote.
        DisagreementError: Ranks have other weights, or read other data.
        NotDistributedError: Nothing says how the processes of this job belong together.

    Example:
        >>> import keras, numpy as np, tempfile
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> with tempfile.TemporaryDirectory() as place:
        ...     rows = predict_to_disk(model, np.ones((100, 4), "float32"), f"{place}/rows")
        ...     len(rows), rows[98:].shape
        (100, (2, 2))
    """
    ranks = ranks_of(model, strategy)
    weights = check_ready(model, ranks)
    source = source_of(data, batch_size, steps)
    asked = Manifest(
        weights,
        source.kind,
        source.digest(),
        source.rows,
        source.steps,
        source.batch_size,
        _batches_of(rows_per_file, source),
    )
    compare([(what, getattr(asked, f)) for f, (what, _) in _FIELDS.items()], ranks, _SAME_DATA)
    predict = _predictor(model)
    files = PartFiles(Path(directory))

    def begin() -> tuple[Manifest, frozenset[int]]:
        settings = model_files.settings_of(model)
        before = _found(files, resume)
        if before is None:
            manifest = _planned(asked, source, predict, ranks.size)
            manifest = dataclasses.replace(manifest, settings=settings)
            files.write_manifest(manifest)
            return manifest, frozenset()
        _check_same(before, dataclasses.replace(asked, settings=settings), files.directory)
        done = files.done(before)
        if before.parts is not None and len(done) < len(before.parts):
            before = dataclasses.replace(before, parts=None)  # somebody has removed some
        return before, done

    manifest, done = on_root(ranks, begin)
    _check_data(source, files, manifest, done, ranks)
    if manifest.parts is not None and source.steps is not None:
        return Predictions(files.directory)
    left = source.parts_of(ranks.rank, ranks.size, lambda part: part not in done, manifest.per_part)
    for part, batches in left:
        files.write(part, *_predict_part(predict, batches, manifest, ranks.rank, part))
    if source.read is not None:
        what = "batches that were read (their number, their rows and a hash)"
        compare([(what, source.read)], ranks, _SAME_DATA)
    read_steps, rows = (source.steps, source.rows) if source.read is None else source.read[:2]
    ranks.barrier()
    on_root(ranks, lambda: _complete(files, manifest, read_steps, rows))
    return Predictions(files.directory)


def _predictor(model: keras.Model) -> Callable[[Tree], Tree]:
    """Make a function that predicts a batch without asking other processes.

    `Model.predict` of a distributed model is a collective of all ranks. This is not: each rank may
    predict other batches, and as many as it likes. Where one process holds several devices, or has
    workers behind parameter servers, all of them compute.
    """
    strategy = strategy_of(model)
    if strategy is not None and (
        len(strategy.local_ranks()) > 1 or strategy.processes != strategy.communicator.size
    ):
        return lambda data: model.predict_on_batch(keras.utils.unpack_x_y_sample_weight(data)[0])

    @tf.autograph.experimental.do_not_convert
    def predict(data: Tree) -> Tree:
        return model.predict_step(data)

    compiled = predict if model.run_eagerly else tf.function(predict, reduce_retracing=True)
    return lambda data: tf.nest.map_structure(_as_array, compiled(data))


def _as_array(output: Leaf) -> Array:
    if isinstance(output, tf.RaggedTensor | tf.SparseTensor):
        raise ValueError(
            f"an output is a {type(output).__name__}, which files of rows cannot hold; end the "
            "model with to_tensor() or tf.sparse.to_dense"
        )
    return keras.ops.convert_to_numpy(output)


def _found(files: PartFiles, resume: bool) -> Manifest | None:
    """Return what an earlier run has planned; None where there is nothing to go on with."""
    files.directory.mkdir(parents=True, exist_ok=True)
    before = files.manifest()
    if before is None and any(files.directory.iterdir()):
        raise ValueError(
            f"{files.directory} holds files and no predictions; give a directory that is new or "
            "empty"
        )
    if before is not None and not resume:
        files.clear(before)
        before = None
    files.clear_drafts()
    return before


def _batches_of(rows_per_file: int | None, source: Source) -> int:
    """Return how many batches make a file of some rows, or a few more; 0 if nothing is said."""
    if rows_per_file is None:
        return 0
    if rows_per_file < 1:
        raise ValueError(f"rows_per_file={rows_per_file}, but a file has 1 row or more")
    rows = source.batch_size or keras.tree.flatten(source.first())[0].shape[0]
    return -(-rows_per_file // max(1, int(rows)))


def _planned(
    asked: Manifest, source: Source, predict: Callable[[Tree], Tree], size: int
) -> Manifest:
    """Predict the first batch, and plan by what comes out."""
    structure, arrays = outputs_of(predict(source.first()))
    per_part = asked.per_part
    if not per_part:
        per_part = max(1, _BYTES // max(1, sum(array.nbytes for array in arrays.values())))
        if source.steps is not None:
            per_part = min(per_part, max(1, source.steps // (_PARTS_PER_RANK * size)))
    outputs = {name: (each.dtype.name, tuple(each.shape[1:])) for name, each in arrays.items()}
    return dataclasses.replace(asked, per_part=per_part, structure=structure, outputs=outputs)


def _check_same(before: Manifest, asked: Manifest, directory: Path) -> None:
    """Refuse to go on with what was predicted of something else."""
    fields = {field: what for field, (_, what) in _FIELDS.items()}
    for field, what in {**fields, "settings": "of a model of other layers"}.items():
        theirs, ours = getattr(before, field), getattr(asked, field)
        if theirs != ours and not (field == "per_part" and ours == 0):
            raise _other(directory, f"{what} ({field} {theirs}, now {ours})")


def _other(directory: Path, what: str) -> ValueError:
    return ValueError(
        f"{directory} holds predictions {what}; give another directory, or resume=False to remove "
        "them and predict anew"
    )


def _check_data(
    source: Source, files: PartFiles, manifest: Manifest, done: Collection[int], ranks: Communicator
) -> None:
    """Refuse to keep parts of which the data has changed; each rank reads its share of them."""
    changed = []
    if done:
        shared = source.parts_of(ranks.rank, ranks.size, done.__contains__, manifest.per_part)
        changed = [
            part
            for part, batches in shared
            if files.digests(part) != [_digest_of(batch) for batch in batches]
        ]
    changed = sorted(part for of_rank in ranks.allgather_object(changed) for part in of_rank)
    if changed:
        first = changed[0] * manifest.per_part
        batches = f"batches {first} to {first + manifest.per_part - 1}"
        more = f" and of {len(changed) - 1} more parts" if changed[1:] else ""
        raise _other(files.directory, f"of other data (a row of {batches}{more} has changed)")


def _digest_of(batch: Tree) -> int:
    return int(digests.digest(_inputs(batch)))


def _predict_part(
    predict: Callable[[Tree], Tree],
    batches: Iterator[Tree],
    manifest: Manifest,
    rank: int,
    part: int,
) -> tuple[dict[str, Array], list[int]]:
    """Return the rows of one part's outputs, by name, and digests of its batches."""
    read: list[int] = []
    predicted: dict[str, list[Array]] = {name: [] for name in manifest.outputs}
    for batch in batches:
        read.append(_digest_of(batch))
        structure, arrays = outputs_of(predict(batch))
        if structure != manifest.structure:
            message = (
                f"in part {part} the model returns {structure}, in the first batch "
                f"{manifest.structure}; it must return the same structure for every batch"
            )
            raise ValueError(at_rank(rank, message))
        for name, array in arrays.items():
            wanted, shape = manifest.outputs[name][1], tuple(array.shape[1:])
            if shape != wanted:
                message = (
                    f"a row of {name} has shape {shape} in part {part}, and {wanted} in the "
                    "first batch; pad batches to one length, so that all rows fit in one array"
                )
                raise ValueError(at_rank(rank, message))
            predicted[name].append(array)
    return {name: np.concatenate(arrays) for name, arrays in predicted.items()}, read


def _complete(files: PartFiles, manifest: Manifest, steps: int | None, rows: int | None) -> None:
    """Say in the manifest that all is there, after all ranks have written; on rank 0."""
    assert steps is not None
    counts = [files.rows(manifest, part) for part in range(-(-steps // manifest.per_part))]
    missing = [part for part, rows in enumerate(counts) if rows is None]
    if missing:
        message = (
            f"{len(missing)} of {len(counts)} parts are not in {files.directory}, the first is "
            f"{missing[0]}, though every rank has written its own; give a directory of a file "
            "system that all hosts share"
        )
        raise ValueError(at_rank(0, message))
    parts = tuple(count for count in counts if count is not None)
    if rows is not None and sum(parts) != rows:
        message = (
            f"{files.directory} holds {sum(parts)} rows that were predicted, and the data has "
            f"{rows}; the model must return one row for each row of a batch, and data that has "
            "grown or shrunk since an earlier run must be predicted anew, with resume=False"
        )
        raise ValueError(at_rank(0, message))
    files.write_manifest(dataclasses.replace(manifest, parts=parts))

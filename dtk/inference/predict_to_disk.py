"""Predictions of data larger than memory: every rank writes its own files, and a run may go on.

    part                0      1      2      3      4      5
    rank 0 of 2        [wrote][wrote][wrote]
    rank 1 of 2                            [wrote] killed
    later, of 3 ranks                              [rank 0][rank 1]

Ranks meet when they begin and when all is written, and never in between: a slow rank stops nobody.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.communicators.root import on_root
from dtk.errors import at_rank
from dtk.inference.part_files import Manifest, PartFiles, Predictions, outputs_of
from dtk.inference.sources import Data, Source, source_of
from dtk.inference.weights import check_ready, ranks_of, strategy_of
from dtk.nests import Array, Tree
from dtk.strategies.dtk_strategy import DtkStrategy
from dtk.trainer.ranks.rank_checks import compare

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
    the files that are complete and makes the others.

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
        ValueError: The directory holds predictions of other weights or data, or something else; the
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
        before = _found(files, resume)
        if before is None:
            manifest = _planned(asked, source, predict, ranks.size)
            files.write_manifest(manifest)
            return manifest, frozenset()
        _check_same(before, asked, files.directory)
        done = files.done(before)
        if before.parts is not None and len(done) < len(before.parts):
            before = dataclasses.replace(before, parts=None)  # somebody has removed some
        return before, done

    manifest, done = on_root(ranks, begin)
    if manifest.parts is not None:
        return Predictions(files.directory)
    for part, batches in source.parts_of(ranks.rank, ranks.size, done, manifest.per_part):
        files.write(part, _predict_part(predict, batches, manifest, ranks.rank, part))
    read_steps = source.steps
    if source.read is not None:
        compare(
            [("batches that were read (their number and hash)", source.read)], ranks, _SAME_DATA
        )
        read_steps = source.read[0]
    ranks.barrier()
    on_root(ranks, lambda: _complete(files, manifest, read_steps, ranks.rank))
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


def _as_array(output: tf.Tensor | tf.RaggedTensor | tf.SparseTensor) -> Array:
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
    _check_rows(arrays)
    per_part = asked.per_part
    if not per_part:
        per_part = max(1, _BYTES // max(1, sum(array.nbytes for array in arrays.values())))
        if source.steps is not None:
            per_part = min(per_part, max(1, source.steps // (_PARTS_PER_RANK * size)))
    outputs = {name: (each.dtype.name, tuple(each.shape[1:])) for name, each in arrays.items()}
    return dataclasses.replace(asked, per_part=per_part, structure=structure, outputs=outputs)


def _check_same(before: Manifest, asked: Manifest, directory: Path) -> None:
    """Refuse to go on with what was predicted of something else."""
    for field, (_, what) in _FIELDS.items():
        theirs, ours = getattr(before, field), getattr(asked, field)
        if theirs != ours and not (field == "per_part" and ours == 0):
            raise ValueError(
                f"{directory} holds predictions {what} ({field} {theirs}, now {ours}); give "
                "another directory, or resume=False to remove them and predict anew"
            )


def _predict_part(
    predict: Callable[[Tree], Tree],
    batches: Iterator[Tree],
    manifest: Manifest,
    rank: int,
    part: int,
) -> dict[str, Array]:
    """Return the rows of one part's outputs, by name."""
    predicted: dict[str, list[Array]] = {name: [] for name in manifest.outputs}
    for batch in batches:
        structure, arrays = outputs_of(predict(batch))
        _check_rows(arrays)
        if structure != manifest.structure:
            raise ValueError(
                at_rank(
                    rank,
                    f"in part {part} the model returns {structure}, in the first batch "
                    f"{manifest.structure}; it must return the same structure for every batch",
                )
            )
        for name, array in arrays.items():
            wanted, shape = manifest.outputs[name][1], tuple(array.shape[1:])
            if shape != wanted:
                raise ValueError(
                    at_rank(
                        rank,
                        f"a row of {name} has shape {shape} in part {part}, and {wanted} in the "
                        "first batch; pad batches to one length, so that all rows fit in one array",
                    )
                )
            predicted[name].append(array)
    return {name: np.concatenate(arrays) for name, arrays in predicted.items()}


def _check_rows(arrays: dict[str, Array]) -> None:
    counts = {name: len(array) for name, array in arrays.items()}
    if len(set(counts.values())) != 1:
        raise ValueError(
            f"the outputs of a batch have different numbers of rows ({counts}), so that no row of "
            "the data has all of them; return one value of each output for each row"
        )


def _complete(files: PartFiles, manifest: Manifest, steps: int | None, rank: int) -> None:
    """Say in the manifest that all is there, after all ranks have written."""
    assert steps is not None
    found = [files.rows(manifest, part) for part in range(-(-steps // manifest.per_part))]
    missing = [part for part, rows in enumerate(found) if rows is None]
    if missing:
        raise ValueError(
            at_rank(
                rank,
                f"{len(missing)} of {len(found)} parts are not in {files.directory}, the first is "
                f"{missing[0]}, though every rank has written its own; give a directory of a file "
                "system that all hosts share",
            )
        )
    parts = tuple(rows for rows in found if rows is not None)
    if manifest.rows is not None and sum(parts) != manifest.rows:
        raise ValueError(
            at_rank(
                rank,
                f"{sum(parts)} rows were predicted of {manifest.rows} rows of data; the model must "
                "return one row for each row of a batch",
            )
        )
    files.write_manifest(dataclasses.replace(manifest, parts=parts))

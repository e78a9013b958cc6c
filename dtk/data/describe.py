"""Description of the data that each rank will read in training."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from dtk.compat import keras_data, tf_datasets
from dtk.data.rows import Data, are_arrays
from dtk.even_division import even_bounds
from dtk.input import slicing
from dtk.nests import Tree
from dtk.strategies.dtk_strategy import DtkStrategy
from dtk.strategies.parameter_server import ParameterServerStrategy

# The default batch size of Keras's `fit` for arrays.
_BATCH_SIZE = 32
_VALUES = 4


class BatchPartRead(NamedTuple):
    """Part of one batch that one rank takes."""

    # index of its first row within the global batch; None if every rank reads its own pipeline, so
    # that only all ranks together have a global batch
    first: int | None
    taken: int  # number of rows; may be 0 if there are fewer rows than ranks
    rows: int  # rows of the global batch
    hash: str  # short hash of the rows taken; "" if there are none
    sample: str  # first values of the first row
    # hash of the global batch, which must be the same on all ranks; "" if every rank reads its own
    # pipeline
    whole: str


class Share(NamedTuple):
    """Share of the data that one rank reads."""

    rank: int
    host: str
    # batches of an epoch; `math.inf` without end, None if not known without reading
    batches: float | None
    types: tuple[str, ...]  # type and shape of a row of each input, such as "float32[8, 8, 1]"
    parts: tuple[BatchPartRead, ...]  # part of each of the first batches


class Description(NamedTuple):
    """Description of the data that all ranks read; `print` shows a table.

    Attributes:
        what: Kind of data, in words.
        shares: Share of each rank, by rank.
        notes: Remarks on things that do not look right.
    """

    what: str
    shares: tuple[Share, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"data: {self.what}"]
        for share in self.shares:
            types = ", ".join(share.types) or "nothing"
            lines.append(f"rank {share.rank} on {share.host}: {_batches(share)} of {types}")
        table = [("batch", "rank", "rows", "hash", "first values")]
        shown = max((len(share.parts) for share in self.shares), default=0)
        for batch in range(shown):
            for share in self.shares:
                for part in share.parts[batch : batch + 1]:
                    cells = (str(batch), str(share.rank), _rows(part), part.hash, part.sample)
                    table.append(cells)
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
        return "\n".join([*lines, *(f"look here: {note}" for note in self.notes)])


class _Rereadable(NamedTuple):
    """Data that can be read again from the beginning."""

    what: str  # kind of data, in words
    batches: float | None  # see `Share`
    read: Callable[[], Iterable[Tree]]  # returns global batches, or this rank's own
    own: bool = False  # whether the batches are this rank's own


def describe(
    dataset: Data, strategy: DtkStrategy, batch_size: int | None = None, batches: int = 3
) -> Description:
    """Show what each rank reads: how many batches, and which rows of the first ones.

    Every rank calls it with the data that it will give to `fit`; rank 0 prints a table. Rows are
    cut as `fit` cuts them. Arrays are shown in their own order; `fit` shuffles them anew for each
    epoch, the same way on every rank. `fit` reads the data once more, which matters if reading
    shuffles it or uses it up.

    Args:
        dataset: Arrays `x` or `(x, y)` or `(x, y, sample_weight)`; a `tf.data.Dataset` of global
            batches; a dataset from `dtk.data.shard` or `distribute_datasets_from_function`; or a
            `keras.utils.PyDataset`.
        strategy: An `AllReduceStrategy` or a `MirroredStrategy`.
        batch_size: For arrays, the global batch as in `fit`; 32 when None, as in `fit`.
        batches: Number of batches to read and show.

    Returns:
        The description, the same on every rank.

    Raises:
        TypeError: Reading this kind of data would use it up.
        ValueError: The batch is smaller than the number of workers; a batch size is given for data
            in batches; or the strategy has parameter servers.

    Example:
        >>> import dtk, numpy as np
        >>> strategy = dtk.strategies.AllReduceStrategy("local")
        >>> told = dtk.data.describe(np.arange(10.0), strategy, batch_size=4, batches=2)
        ... # doctest: +ELLIPSIS
        data: arrays of 10 rows, in batches of 4, before shuffling
        rank 0 on ...: 3 batches of float32[]
        batch  rank  rows      hash      first values
        0      0     0-3 of 4  ...  0
        1      0     0-3 of 4  ...  4
        >>> told.shares[0].batches
        3
    """
    if not isinstance(strategy, DtkStrategy) or isinstance(strategy, ParameterServerStrategy):
        raise ValueError(
            f"strategy is a {type(strategy).__name__}; expected an AllReduceStrategy or a "
            "MirroredStrategy of dtk. Workers of parameter servers take batches as they become "
            "free, so it is not known ahead which worker reads which rows"
        )
    if batches < 1:
        raise ValueError(f"batches={batches}, expected 1 or more")
    source = _source(dataset, strategy, batch_size)
    read = itertools.islice(source.read(), batches)
    seen = [_parts(batch, strategy, source.own) for batch in read]
    communicator, mine = strategy.communicator, []
    for index, rank in enumerate(strategy.local_ranks()):
        types = seen[0][index][1] if seen else ()
        parts = tuple(by_rank[index][0] for by_rank in seen)
        host = communicator.hosts[communicator.rank]
        mine.append(Share(rank, host, source.batches, types, parts))
    shares = [share for told in communicator.allgather_object(mine) for share in told]
    if source.own:
        shares = _with_global_rows(shares)
    description = Description(source.what, tuple(shares), tuple(_notes(shares)))
    if strategy.is_chief:
        print(description, flush=True)
    return description


def _source(dataset: Data, strategy: DtkStrategy, batch_size: int | None) -> _Rereadable:
    if are_arrays(dataset):
        return _arrays(dataset, strategy, batch_size)
    if batch_size is not None:
        raise ValueError(
            f"batch_size={batch_size} with a {type(dataset).__name__}, which comes in batches; "
            "leave it out"
        )
    own = tf_datasets.is_of_this_rank(dataset)
    if isinstance(dataset, tf_datasets.PerRankDataset):
        dataset = tf_datasets.read_alone(dataset)
    if isinstance(dataset, tf.data.Dataset):
        what = "a tf.data.Dataset of global batches"
        if own:
            what = "a pipeline for each rank, not cut again"
        return _Rereadable(what, _count(dataset), lambda: dataset, own=own)
    if isinstance(dataset, keras.utils.PyDataset):
        count = dataset.num_batches
        numbers: Iterable[int] = itertools.count() if count is None else range(count)
        return _Rereadable(
            f"a {type(dataset).__name__}, read by every rank, before shuffling",
            math.inf if count is None else count,
            lambda: (dataset[number] for number in numbers),
        )
    raise TypeError(
        f"cannot describe a {type(dataset).__name__}; expected arrays (a tuple of them for x and "
        "y), a tf.data.Dataset, a keras.utils.PyDataset or what dtk.data.shard returned. A "
        "generator can be read only once: describe another one made in the same way, with "
        "tf.data.Dataset.from_generator"
    )


def _arrays(arrays: Data, strategy: DtkStrategy, batch_size: int | None) -> _Rereadable:
    batch_size = batch_size or _BATCH_SIZE
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(arrays)
    adapter = keras_data.ArrayDataAdapter(x, y, sample_weight, batch_size=batch_size, shuffle=False)
    rows = tf.nest.flatten(arrays)[0].shape[0]
    what = f"arrays of {rows} rows, in batches of {batch_size}, before shuffling"
    return _Rereadable(what, adapter.num_batches, adapter.get_tf_dataset)


def _count(dataset: tf.data.Dataset) -> float | None:
    count = int(dataset.cardinality())
    unknown = {tf.data.INFINITE_CARDINALITY: math.inf, tf.data.UNKNOWN_CARDINALITY: None}
    return unknown.get(count, count)


def _parts(
    batch: Tree, strategy: DtkStrategy, own: bool
) -> list[tuple[BatchPartRead, tuple[str, ...]]]:
    """Return the part of a batch, and the types of its rows, for each replica of this process."""
    batch = tf.nest.map_structure(
        lambda leaf: leaf if leaf is None or tf.is_tensor(leaf) else tf.convert_to_tensor(leaf),
        batch,
    )
    if own:
        count = int(slicing.count_rows(batch))
        return [
            (BatchPartRead(None, count, count, _hash(batch), _sample(batch), ""), _types(batch))
        ]
    size, ranks = strategy.num_replicas_in_sync, strategy.local_ranks()
    slices, whole = slicing.cut_batch(batch, ranks, size), _hash(batch)
    rows, told = int(slices.rows), []
    for rank, rank_batch, count in zip(ranks, slices.parts, slices.counts, strict=True):
        count = int(count)
        first, _ = even_bounds(rows, rank, size)
        shown = (_hash(rank_batch), _sample(rank_batch)) if count else ("", "")
        told.append((BatchPartRead(first, count, rows, *shown, whole), _types(batch)))
    return told


def _with_global_rows(shares: Sequence[Share]) -> list[Share]:
    """Set the rows of each global batch: the sum over all ranks."""
    steps = itertools.zip_longest(*(share.parts for share in shares))
    rows = [sum(part.taken for part in parts if part is not None) for parts in steps]
    return [
        share._replace(parts=tuple(map(lambda p, n: p._replace(rows=n), share.parts, rows)))
        for share in shares
    ]


def _notes(shares: Sequence[Share]) -> Iterable[str]:
    """Yield remarks on mistakes, at most one of each kind."""
    first = shares[0]
    other = next((share for share in shares if share.batches != first.batches), None)
    if other is not None:
        yield (
            f"rank {first.rank} has {_batches(first)}, rank {other.rank} {_batches(other)}; "
            "every rank must take the same number of steps"
        )
    for batch, parts in enumerate(zip(*(share.parts for share in shares), strict=False)):
        wholes = [part.whole for part in parts]
        odd = next((i for i, whole in enumerate(wholes) if whole != wholes[0]), None)
        if odd is not None:
            yield (
                f"ranks 0 and {odd} were given different rows in batch {batch}; give every rank "
                "the same global batches, or each its part by dtk.data.shard"
            )
            return
        seen: dict[str, int] = {}
        for rank, part in enumerate(parts):
            twin = seen.setdefault(part.hash, rank)
            if part.first is None and part.hash and twin != rank:
                yield (
                    f"ranks {twin} and {rank} read the same rows in batch {batch}; a pipeline for "
                    "each rank must read other rows on each"
                )
                return


def _hash(batch: Tree) -> str:
    digest = hashlib.blake2b(digest_size=4)
    leaves = tf.nest.flatten(batch, expand_composites=True)
    for array in (leaf.numpy() for leaf in leaves if isinstance(leaf, tf.Tensor)):
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(str(array.tolist()).encode() if array.dtype == object else array.tobytes())
    return digest.hexdigest()


def _sample(batch: Tree) -> str:
    leaf = tf.nest.flatten(batch)[0]
    if not isinstance(leaf, tf.Tensor) or not leaf.shape[0]:
        return ""
    values = np.ravel(leaf[0].numpy())
    shown = [
        value.decode(errors="replace") if isinstance(value, bytes) else f"{value:.4g}"
        for value in values[:_VALUES]
    ]
    return " ".join([*shown, *(["..."] if len(values) > _VALUES else [])])


def _types(batch: Tree) -> tuple[str, ...]:
    return tuple(
        f"{leaf.dtype.name}{list(leaf.shape[1:])}"
        for leaf in tf.nest.flatten(batch)
        if tf.is_tensor(leaf)
    )


def _batches(share: Share) -> str:
    if share.batches is None:
        return "as many batches as reading will tell"
    if share.batches == math.inf:
        return "batches without end"
    return f"{share.batches} batch{'es' * (share.batches != 1)}"


def _rows(part: BatchPartRead) -> str:
    if not part.taken:
        return f"none of {part.rows}"
    if part.first is None:
        return f"{part.taken} rows of {part.rows}"
    return f"{part.first}-{part.first + part.taken - 1} of {part.rows}"

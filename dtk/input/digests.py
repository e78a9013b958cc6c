"""Digests of batches, by which ranks find out whether they read the same global batches.

Every rank must read the same batches and takes its own rows, or it trains on the wrong rows. Each
batch carries a digest: of all its bytes for a pipeline's first batches, of entries spread over it
for later ones. Ranks compare the first batch's digest before the first step, and the combined
digest of all batches so far after 2, 4, 8, ... steps and each epoch.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from dtk.input import slicing
from dtk.nests import Array, Tree

# Number of first batches digested with all bytes; of entries digested in later ones; and of rows
# that are taken from arrays for it, unless more have so few entries.
_WHOLE_BATCHES = 4
_ENTRIES = 1024
_ROWS = 4

# TensorFlow's name for the pipeline that gives back the batches read before training.
FIRST_BATCHES = "dtk_first_batches"

# Odd, so that multiplication by it loses no bits.
_FACTOR = 0x5851F42D4C957F2D


def digest_of(number: tf.Tensor, batch: Tree) -> tf.Tensor:
    """Compute the digest of a pipeline's batch with this number."""
    return digest(batch, number < _WHOLE_BATCHES)


def rows_to_digest(number: tf.Tensor, rows: tf.Tensor, entries: int) -> tf.Tensor:
    """Choose rows of an array to digest, which have this many entries, from those of a batch."""
    few = max(_ROWS, _ENTRIES // max(entries, 1))
    return rows[:: tf.where(number < _WHOLE_BATCHES, 1, tf.maximum(tf.size(rows) // few, 1))]


def digest(batch: Tree, whole: bool | tf.Tensor = True) -> tf.Tensor:
    """Compute a number that differs between different batches.

    Example:
        >>> one, other = tf.constant([1.0, 2.0]), tf.constant([2.0, 1.0])
        >>> bool(digest(one) == digest(tf.identity(one))), bool(digest(one) == digest(other))
        (True, False)
    """
    number = tf.constant(0, tf.int64)
    for leaf in tf.nest.flatten(batch, expand_composites=True):
        if isinstance(leaf, tf.Tensor) and leaf.dtype not in (tf.variant, tf.resource):
            shape = tf.shape(leaf, out_type=tf.int64)
            number = add(add(number, _digest_of(_entries(leaf, whole))), _digest_of(shape))
    return number


def add(before: tf.Tensor, digest: tf.Tensor) -> tf.Tensor:
    """Combine the digest of a sequence with the digest of its next element."""
    return before * tf.constant(_FACTOR, tf.int64) + digest


def _entries(leaf: tf.Tensor, whole: bool | tf.Tensor) -> tf.Tensor:
    flat = tf.reshape(leaf, [-1])
    stride = tf.maximum(tf.size(flat) // _ENTRIES, 1)
    return flat[:: tf.where(whole, 1, stride)]


def _digest_of(flat: tf.Tensor) -> tf.Tensor:
    if flat.dtype == tf.string:
        flat = tf.strings.to_hash_bucket_fast(flat, 2**62)
    elif flat.dtype == tf.bool:
        flat = tf.cast(flat, tf.uint8)
    bytes_ = flat if flat.dtype == tf.uint8 else tf.bitcast(flat, tf.uint8)
    return tf.bitcast(tf.fingerprint(tf.reshape(bytes_, [1, -1])), tf.int64)[0]


def first_of(
    iterator: tf.data.Iterator, steps: int
) -> tuple[slicing.Slices, Iterator[slicing.Slices]]:
    """Read the first element; return it and an iterator over the first `steps` elements."""
    elements = [next(iterator)]
    elements += [element for _, element in zip(range(steps - 1), iterator, strict=False)]
    spec = iterator.element_spec
    dataset = tf.data.Dataset.from_tensors(elements[0])
    for element in elements[1:]:
        dataset = dataset.concatenate(tf.data.Dataset.from_tensors(element))

    @tf.autograph.experimental.do_not_convert
    def as_before(slices: slicing.Slices) -> slicing.Slices:
        # Give the shapes of the pipeline's spec (any number of rows), or steps are traced anew.
        return tf.nest.map_structure(_of_shape, slices, spec)

    options = tf.data.Options()
    options.autotune.enabled = False  # see `slicing`
    options.dataset_name = FIRST_BATCHES
    return elements[0], iter(dataset.map(as_before).with_options(options))


def _of_shape(value: tf.Tensor, spec: tf.TypeSpec) -> tf.Tensor:
    if not isinstance(spec, tf.TensorSpec) or value.shape == spec.shape:
        return value
    return tf.raw_ops.PlaceholderWithDefault(input=value, shape=spec.shape)


# Arrays.

_hashes: dict[int, tuple[weakref.ref[Array], int, int]] = {}


def hash_of(array: Array) -> int:
    """Compute a hash of all bytes of an array, once for each array object.

    If a script changes the array between two calls, it is hashed again if a sample has changed.
    """
    key, sample = id(array), _hash(array.reshape(-1)[:: max(1, array.size // _ENTRIES)])
    known = _hashes.get(key)
    if known is not None and known[0]() is array and known[1] == sample:
        return known[2]
    full_hash = _hash(array)
    _hashes[key] = weakref.ref(array, lambda _: _hashes.pop(key, None)), sample, full_hash
    return full_hash


def _hash(array: Array) -> int:
    if array.dtype == object:
        return zlib.crc32(repr(array.tolist()).encode())
    if not array.dtype.isnative or array.dtype.kind in "OV":
        return zlib.crc32(array.tobytes())
    return zlib.crc32(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)

"""Send a few bits for each entry of a gradient, and lose no gradient.

With K workers, a gradient of several columns (see `codec`) is summed in two stages. Each worker
owns some of the columns:

    worker k    v = gradient + residual;  code = encode(v);  residual = v - decode(code)
                    | each owner gets its columns of all ranks' codes        (all-to-all)
    owner       s = sum of K decoded + own residual; code = encode(s); residual = s - decode(code)
                    | every rank gets every owner's columns                  (all-gather)
    worker k    sum = decode(code), bit for bit the same everywhere

Each worker sends 2 (K-1)/K times a code, as a ring all-reduce sends 2 (K-1)/K times a gradient, so
one bit per entry sends about a thirtieth. The residuals keep the rounding errors and add them later
(error feedback).

Sources: Seide et al. 2014 (1-bit SGD); CNTK's `V2AllReduceDistributedCommunicator`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.even_division import even_bounds, even_sizes
from dtk.exchange import codec
from dtk.exchange.contract import (
    BatchPart,
    Exchange,
    ExchangeOp,
    ExchangeState,
    Gradient,
    Trained,
    Update,
)
from dtk.exchange.dense import Dense

# Bits of an entry that is sent unchanged.
WHOLE = 32
_EXPECTED = (
    f"expected {codec.BITS[0]} to {codec.BITS[-1]}, or {WHOLE} for whole gradients, as Dense()"
)


@dataclass(frozen=True)
class Quantized(Exchange):
    """Send a few bits per entry of a gradient; add the rounding error to the next gradient.

    Only kernels are coded: gradients of two or more dimensions with a code at most two thirds as
    long. Biases and the like are few and are sent whole; so are rows of tables
    (`tf.IndexedSlices`).

    Each rank keeps two float32 residuals per entry (one of them for only 1/K of the entries), also
    in checkpoints. If any rank's gradients are not finite in a step, the residuals stay unchanged
    on all ranks.

    Args:
        bits: 1 to 16 per entry, or 32, which sends whole gradients as `Dense` does. With 1, most
            models need a warm start, see `dtk.exchange.WarmStart`.

    Raises:
        ValueError: `bits` is another number.

    Example:
        >>> Quantized(bits=1)
        Quantized(bits=1)
    """

    bits: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.bits, int) or isinstance(self.bits, bool):
            raise ValueError(f"Quantized(bits={self.bits!r}); {_EXPECTED}")
        if self.bits not in (*codec.BITS, WHOLE):
            why = (
                ". Codes are computed in float32, whose mantissa has 24 bits: with more than "
                f"{codec.BITS[-1]} its own rounding becomes a part of every step"
            )
            between = codec.BITS[-1] < self.bits < WHOLE
            raise ValueError(f"Quantized(bits={self.bits}); {_EXPECTED}{why * between}")

    @property
    def codes(self) -> bool:
        """Whether anything is quantised."""
        return self.bits < WHOLE

    @property
    def remembers(self) -> bool:  # type: ignore[override]
        """See `Exchange`."""
        return self.codes

    def init(
        self, communicator: Communicator, state: ExchangeState, trained: Trained
    ) -> ExchangeOp:
        """See `Exchange.init`."""
        if not self.codes:
            return Dense().init(communicator, state, trained)
        return QuantizedOp(communicator, state, trained, self)


def is_coded(shape: Sequence[int], dtype: tf.DType, bits: int) -> bool:
    """Return whether a gradient of this shape and dtype is quantised.

    It must have two or more dimensions and a code at most two thirds as long. For float32, a code
    of 16 bits is half as long, plus the scales of each column.

    Example:
        >>> [is_coded(shape, tf.float32, 1) for shape in [(100, 10), (3, 10), (100,)]]
        [True, False, False]
    """
    if len(shape) < 2 or not dtype.is_floating:
        return False
    columns, entries = codec.matrix_shape(shape)
    whole = columns * entries * dtype.size
    return 0 < 3 * codec.bytes_of(columns, entries, bits) <= 2 * whole


class _Kernel(NamedTuple):
    """The matrix of a coded gradient."""

    columns: int
    entries: int  # of a column
    counts: list[int]  # how many columns each rank owns, in rank order


class QuantizedOp(ExchangeOp):
    """The two stages for all coded gradients at once, with one message each."""

    exchange: Quantized
    exact = True  # of what has too few entries for a code

    def prepare(self) -> None:
        """See `ExchangeOp.prepare`."""
        self.bits = self.exchange.bits

    def update(self, gradients: list[Gradient], part: BatchPart | None = None) -> Update:
        """See `ExchangeOp.update`."""
        results = list(gradients)
        coded = [i for i, g in enumerate(gradients) if self._codes(g)]
        others = [i for i in range(len(gradients)) if i not in coded]
        whole = self.communicator.allreduce([gradients[i] for i in others])
        sums = self._reduce_coded({i: gradients[i] for i in coded}, whole) if coded else []
        for i, result in zip([*others, *coded], [*whole, *sums], strict=True):
            results[i] = result
        return results, None

    def _codes(self, gradient: tf.Tensor | tf.IndexedSlices) -> bool:
        if isinstance(gradient, tf.IndexedSlices) or not gradient.shape.is_fully_defined():
            return False
        return is_coded(tuple(gradient.shape), gradient.dtype, self.bits)

    def _reduce_coded(
        self, gradients: dict[int, tf.Tensor], whole: list[tf.Tensor | tf.IndexedSlices]
    ) -> list[tf.Tensor]:
        rank, size = self.communicator.rank, self.communicator.size
        shapes = [codec.matrix_shape(gradient.shape) for gradient in gradients.values()]
        kernels = [_Kernel(*shape, even_sizes(shape[0], size)) for shape in shapes]
        residuals = [
            self.state.variable(f"residual_{i}", "sum", (k.columns, k.entries))
            for i, k in zip(gradients, kernels, strict=True)
        ]
        of_sums = [
            self.state.variable(
                f"owner_residual_{i}",
                "stripe",
                (k.counts[rank], k.entries),
                rows=even_bounds(k.columns, rank, size),
            )
            for i, k in zip(gradients, kernels, strict=True)
        ]
        matrices = [codec.to_columns(g) for g in gradients.values()]
        codes, decoded, left = self._quantise(matrices, residuals)
        sums = self._to_owners(codes, decoded, kernels)
        codes, _, left_of_sums = self._quantise(sums, of_sums)
        codes = self._to_all(codes, kernels)
        received = [*whole, *(code.scales for code in codes)]
        self.keep_if_finite([*residuals, *of_sums], [*left, *left_of_sums], received)
        return [
            codec.from_columns(codec.decode(code, k.entries, self.bits), g.shape, g.dtype)
            for code, k, g in zip(codes, kernels, gradients.values(), strict=True)
        ]

    def _quantise(
        self, matrices: list[tf.Tensor], residuals: list[tf.Variable]
    ) -> tuple[list[codec.Code], list[tf.Tensor], list[tf.Tensor]]:
        """Encode matrices plus residuals; return codes, decoded values and new residuals."""
        wanted = [m + residual for m, residual in zip(matrices, residuals, strict=True)]
        codes = [codec.encode(w, self.bits) for w in wanted]
        decoded = [
            codec.decode(code, w.shape[1], self.bits) for code, w in zip(codes, wanted, strict=True)
        ]
        return codes, decoded, [w - d for w, d in zip(wanted, decoded, strict=True)]

    def _to_owners(
        self, codes: list[codec.Code], decoded: list[tf.Tensor], kernels: list[_Kernel]
    ) -> list[tf.Tensor]:
        """Stage 1: send codes to the owners; return the sums of this rank's columns."""
        rank, size = self.communicator.rank, self.communicator.size
        pairs = list(zip(codes, kernels, strict=True))
        by_rank = zip(*(_cut(code, k.counts) for code, k in pairs), strict=True)
        blocks = [codec.to_bytes(of_rank) for j, of_rank in enumerate(by_rank) if j != rank]
        lengths = self._lengths(kernels)
        received, _ = self.communicator.alltoall(
            tf.concat(blocks, 0),
            [[0 if i == j else lengths[j] for j in range(size)] for i in range(size)],
        )
        parts = self._codes_in(tf.reshape(received, (size - 1, lengths[rank])), kernels, rank)
        sums = []
        for own, part, k in zip(decoded, parts, kernels, strict=True):
            others = codec.decode(part, k.entries, self.bits)
            stacked = tf.reshape(others, (-1, k.counts[rank], k.entries))
            sums.append(tf.split(own, k.counts)[rank] + tf.reduce_sum(stacked, 0))
        return sums

    def _to_all(self, codes: list[codec.Code], kernels: list[_Kernel]) -> list[codec.Code]:
        """Stage 2: send every owner's columns to every rank."""
        lengths = self._lengths(kernels)
        gathered = tf.split(self.communicator.allgather(codec.to_bytes(codes), lengths), lengths)
        by_rank = [self._codes_in(part[None], kernels, j) for j, part in enumerate(gathered)]
        return [
            codec.Code(*(tf.concat(tensors, 0) for tensors in zip(*parts, strict=True)))
            for parts in zip(*by_rank, strict=True)
        ]

    def _codes_in(self, rows: tf.Tensor, kernels: list[_Kernel], owner: int) -> list[codec.Code]:
        """Cut bytes, a row for each sender, into the codes of an owner's columns."""
        counts, entries = [k.counts[owner] for k in kernels], [k.entries for k in kernels]
        return codec.from_bytes(rows, counts, entries, self.bits)

    def _lengths(self, kernels: list[_Kernel]) -> list[int]:
        """Return, for each rank, the bytes of the codes of its columns."""
        return [
            sum(codec.bytes_of(k.counts[rank], k.entries, self.bits) for k in kernels)
            for rank in range(self.communicator.size)
        ]


def _cut(code: codec.Code, counts: list[int]) -> list[codec.Code]:
    return [codec.Code(*p) for p in zip(*(tf.split(t, counts) for t in code), strict=True)]

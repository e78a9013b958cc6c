"""The kind of each scalar of a step: a mean over rows, a sum, or a ratio of two sums.

dtk assumes that every scalar of a step (a loss or a logged number) is a mean over the replica's
rows, and weighs it by the replica's share of the rows: the weighted sum over the replicas is the
global batch's mean. Keras's own losses are such means. For others, `self_test` computes a few rows
both ways; the scalars are recorded here as *terms*, by name, and it finds the kind of each:

    mean     sum_w share_w v_w  =  v        unchanged
    sum      sum_w v_w          =  v        divided by the share
    ratio    v_w = a_w / b_w, both of them sums, such as a mean over unmasked entries:
             replaced by a_w / (share_w sum_w b_w)

If a loss is a sum of terms of different kinds, its graph is followed back to the scalars that enter
it linearly; without a graph (`run_eagerly`) the loss is one term.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import tensorflow as tf

MEAN, SUM, RATIO = "mean", "sum", "ratio"
# A loss that does not add up over rows: `whole_batch` computes it on the rows of all replicas.
BATCH = "loss of the whole batch"

# The factor of a term in the scalar that it is a part of.
Coefficient: TypeAlias = "float | tf.Tensor"

# Number of ops to follow a loss back through its graph; a longer sum is one term.
_MOST_OPS = 2000


class Term(NamedTuple):
    """One scalar, as this replica computed it."""

    value: tf.Tensor
    numerator: tf.Tensor | None = None  # None if the scalar is not a quotient
    denominator: tf.Tensor | None = None


class Terms:
    """The terms of one replica's step, in the order of their computation."""

    def __init__(
        self,
        share: tf.Tensor,
        sum_over_replicas: Callable[[tf.Tensor], tf.Tensor],
        kinds: Mapping[str, str],
    ):
        self.by_name: dict[str, Term] = {}
        self._share = share
        self._sum_over_replicas = sum_over_replicas
        self._kinds = kinds
        self._known: set[Hashable] = set()
        self._calls: dict[str, int] = {}

    def mark_mean(self, value: tf.Tensor) -> tf.Tensor:
        """Record a scalar as a mean over rows."""
        self._known.add(value.ref())
        return value

    def to_mean(self, where: str, value: tf.Tensor) -> tf.Tensor:
        """Convert a scalar to a mean over rows, by the kinds of its terms."""
        parts = self.parts(where, value)
        if parts is None:  # an unchanged scalar may be examined again as a part of another
            return value
        return self.mark_mean(tf.add_n([_times(scalar, factor) for factor, scalar in parts]))

    def parts(self, where: str, value: tf.Tensor) -> list[tuple[Coefficient, tf.Tensor]] | None:
        """Return scalars with the factors by which they sum to a mean; None if `value` is one."""
        call = self._calls[where] = self._calls.get(where, -1) + 1
        parts, changed = [], False
        for i, (coefficient, scalar) in enumerate(linear_terms(value, self._known)):
            if scalar.ref() not in self._known:
                name = f"{where} {call}" + (f" term {i}" if i else "")
                self.by_name[name] = term = Term(scalar, *_quotient(scalar))
                kind = self._kinds.get(name, MEAN)
                if kind != MEAN:
                    changed = True
                    factor, scalar = self._mean_of(kind, term)
                    coefficient = _product(coefficient, factor)
            parts.append((coefficient, scalar))
        return parts if changed else None

    def _mean_of(self, kind: str, term: Term) -> tuple[tf.Tensor, tf.Tensor]:
        """Return a factor and a scalar, of which the product is a mean over rows."""
        share = tf.cast(self._share, term.value.dtype)
        if kind == SUM:
            return tf.math.divide_no_nan(tf.ones_like(share), share), term.value
        # The quotient itself is 0 / 0 where a mask leaves none of this replica's rows.
        assert term.numerator is not None and term.denominator is not None
        whole = share * self._sum_over_replicas(tf.stop_gradient(term.denominator))
        return tf.math.divide_no_nan(tf.ones_like(share), whole), term.numerator


def _times(scalar: tf.Tensor, factor: Coefficient) -> tf.Tensor:
    # A mean over no rows is not a number, and counts as zero.
    return tf.math.multiply_no_nan(scalar, tf.cast(factor, scalar.dtype))


def linear_terms(value: tf.Tensor, known: set[Hashable]) -> list[tuple[Coefficient, tf.Tensor]]:
    """Find the scalars that a scalar is a linear combination of."""
    terms = factored_terms(value, known)
    return [(functools.reduce(_product, factors, 1.0), scalar) for factors, scalar in terms]


def factored_terms(
    value: tf.Tensor, known: set[Hashable]
) -> list[tuple[list[Coefficient], tf.Tensor]]:
    """Find the scalars that a scalar is a linear combination of, each with all its factors."""
    if tf.executing_eagerly() or not isinstance(value, tf.Tensor):
        return [([], value)]
    terms: list[tuple[list[Coefficient], tf.Tensor]] = []
    left: list[tuple[list[Coefficient], tf.Tensor]] = [([], value)]
    for _ in range(_MOST_OPS):
        if not left:
            return terms
        factors, tensor = left.pop()
        parts = None if tensor.ref() in known else _parts_of(tensor)
        if parts is None:
            terms.append((factors, tensor))
        else:
            left.extend(([*factors, factor], part) for factor, part in reversed(parts))
    return [([], value)]


def _product(one: Coefficient, other: Coefficient) -> Coefficient:
    if isinstance(other, float) or not tf.is_tensor(other):
        return one * other
    return tf.cast(one, other.dtype) * other


def _parts_of(tensor: tf.Tensor) -> list[tuple[Coefficient, tf.Tensor]] | None:
    """Return the scalars that an op adds up, with their coefficients; None for other ops."""
    op = tensor.op
    inputs = list(op.inputs)
    if op.type in ("Identity", "Cast", "Reshape", "Squeeze", "EnsureShape", "Snapshot"):
        if _is_scalar(inputs[0]) and inputs[0].dtype == tensor.dtype:
            return [(1.0, inputs[0])]
    elif op.type in ("AddV2", "Add", "AddN"):
        if all(map(_is_scalar, inputs)):
            return [(1.0, i) for i in inputs]
    elif op.type == "Sub":
        if all(map(_is_scalar, inputs)):
            return [(1.0, inputs[0]), (-1.0, inputs[1])]
    elif op.type == "Neg":
        return [(-1.0, inputs[0])]
    elif op.type in ("Sum", "Mean"):
        packed = inputs[0].op
        if _is_scalar(inputs[0]):  # as `tf.nn.scale_regularization_loss` of a sum of penalties
            return [(1.0, inputs[0])]
        if packed.type == "Pack" and all(map(_is_scalar, packed.inputs)):
            each = 1.0 if op.type == "Sum" else 1.0 / len(packed.inputs)
            return [(each, i) for i in packed.inputs]
    elif op.type == "Mul":
        for factor, scalar in (inputs, inputs[::-1]):
            if _is_scalar(factor) and _is_scalar(scalar) and not depends_on_data(factor):
                return [(factor, scalar)]
    elif op.type == "RealDiv" and all(map(_is_scalar, inputs)) and not depends_on_data(inputs[1]):
        return [(1.0 / inputs[1], inputs[0])]
    return None


def _is_scalar(tensor: tf.Tensor) -> bool:
    return tensor.shape.rank == 0


def _quotient(scalar: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor] | tuple[()]:
    """Return numerator and denominator of a scalar that is a quotient; else ()."""
    if not tf.is_symbolic_tensor(scalar) or scalar.op.type not in ("RealDiv", "DivNoNan"):
        return ()
    numerator, denominator = scalar.op.inputs
    if not _is_scalar(numerator) or not _is_scalar(denominator):
        return ()
    # A denominator that counts rows without reading them makes a sum a mean, not a ratio.
    return (numerator, denominator) if depends_on_data(denominator, by_shape=False) else ()


def depends_on_data(tensor: tf.Tensor, by_shape: bool = True) -> bool:
    """Return whether a tensor of a graph is computed from the graph's inputs.

    Variables and constants are not inputs.
    """
    sources = computed_from([tensor], () if by_shape else ("Shape", "Size", "Rank"))
    inputs = ("Placeholder", "PlaceholderWithDefault")
    return any(one.op.type in inputs and one.dtype != tf.resource for one in sources)


def computed_from(
    tensors: Iterable[tf.Tensor], without: Sequence[str] = (), ends: Iterable[Hashable] = ()
) -> Iterator[tf.Tensor]:
    """Yield tensors and all that they are computed from, but through no op of some types.

    Nor through `ends`, the references of tensors, which are not yielded.
    """
    seen = set(ends)
    left = list(tensors)
    while left:
        one = left.pop()
        if one.ref() not in seen and one.op.type not in without:
            seen.add(one.ref())
            yield one
            left.extend(one.op.inputs)

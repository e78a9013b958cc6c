"""The contract of exchanges, which decide what workers send each other, and when.

An `Exchange` is a value, such as `Quantized(bits=1)`. For each list of trained variables it makes
an `ExchangeOp`, which adds the exchange's ops to a step:

    this rank's part of the gradients  ->  op.update  ->  their sum over all ranks  ->  optimizer

What an op remembers between steps lies in its `ExchangeState`.
"""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias, TypedDict

import numpy as np
import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.exchange.factors import Factored
from dtk.nests import Array
from dtk.placement import outside_graph

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | Factored


# The gradients that an optimizer applies, in the same order, shapes and dtypes as the given ones;
# and whether it applies them, a bool scalar; None: always.
Update: TypeAlias = "tuple[list[Gradient], tf.Tensor | None]"


class Trained(NamedTuple):
    """The variables that an optimizer trains, and its momentum variables."""

    variables: Sequence[tf.Variable] = ()  # in the order of their gradients
    momenta: Sequence[tf.Variable] = ()  # the optimizer's averages of gradients, if it has any


NOTHING_TRAINED = Trained()


class BatchPart(NamedTuple):
    """This rank's part of a step's global batch."""

    rows: tf.Tensor  # rows of the global batch, int64 scalar
    example_weight: tf.Tensor  # this rank's part of these rows, float64; the sum over ranks is 1


def run_if(condition: tf.Tensor, change: Callable[[], object]) -> tf.Tensor:
    """Call what changes variables if a condition holds when the step runs; return whether."""

    def changed() -> bool:
        change()
        return True

    return tf.cond(condition, changed, lambda: False)


class Exchange(abc.ABC):  # noqa: B024
    """A way to send gradients or weights between workers.

    With one worker no op is made: gradients stay as they are (`GradientExchange`).

    Attributes:
        op: The class of its ops.
        local: Whether workers also take local steps, so that weights differ between ranks after
            some steps.
        remembers: Whether a part of a step's gradients is added to a later step's gradients.
    """

    op: type[ExchangeOp]
    local = False
    remembers = False

    def init(
        self, communicator: Communicator, state: ExchangeState, trained: Trained
    ) -> ExchangeOp:
        """Make the op that exchanges one list of gradients.

        Args:
            communicator: Between the workers.
            state: Holds the op's variables.
            trained: The variables of the gradients.

        Returns:
            An op of the same kind on all ranks.
        """
        return self.op(communicator, state, trained, self)

    def check(self, communicator: Communicator) -> None:  # noqa: B027
        """Refuse a communicator with too many workers, or one that cannot sum the exchange's dtype.

        Args:
            communicator: Between the workers.

        Raises:
            ValueError: The exchange cannot work; the message says what to do.
        """


class ExchangeOp(abc.ABC):
    """Exchanges one list of gradients; the same list, in the same order, at every step.

    Every rank calls it at every step. Sums are the same on all ranks, bit for bit.

    Attributes:
        factors: Whether it takes gradients of Dense kernels as their factors.
        exact: Whether it would also sum tensors that are no gradients, whole and unchanged.
        block: The `LocalOp` whose block is open; None if weights are equal after every step.
    """

    factors = exact = False
    block: ExchangeOp | None = None

    def __init__(
        self,
        communicator: Communicator,
        state: ExchangeState,
        trained: Trained = NOTHING_TRAINED,
        exchange: Exchange | None = None,
    ):
        self.communicator, self.state = communicator, state
        self.trained, self.exchange = trained, exchange
        self.prepare()

    def prepare(self) -> None:  # noqa: B027
        """Make the ops that this one is made of."""

    @abc.abstractmethod
    def update(self, gradients: list[Gradient], part: BatchPart | None = None) -> Update:
        """Exchange this step's gradients; return those for the optimizer to apply now."""

    @staticmethod
    def keep_if_finite(
        variables: Sequence[tf.Variable],
        values: Sequence[tf.Tensor],
        received: Sequence[tf.Tensor | tf.IndexedSlices],
    ) -> None:
        """Assign what remains of this step's gradients, unless some rank's were not finite.

        The optimizer may skip such a step, and its gradients are then lost. Every rank sees this in
        the values that all ranks received.
        """
        tensors = [getattr(each, "values", each) for each in received]
        finite = [tf.reduce_all(tf.math.is_finite(t)) for t in tensors if t.dtype.is_floating]

        def assign() -> None:
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)

        run_if(tf.reduce_all(finite), assign)

    def count(self, part: BatchPart | None) -> None:  # noqa: B027
        """Count a step's batch, after its gradients are applied."""


class SavedItem(TypedDict):
    """A checkpoint's entry for a variable."""

    kind: str
    value: Array  # the values of all ranks along the first axis, unless the kind is "same"


class _StateVariable(NamedTuple):
    variable: tf.Variable
    kind: str
    rows: tuple[int, int] | None  # of a stripe: its first row, and the one after its last


class ExchangeState:
    """Named variables between steps, made when a traced step first asks for them.

    The kind of a variable decides what a checkpoint holds, and how another number of ranks restores
    it:

        same      equal on all ranks
        sum       differs by rank; their sum counts (residuals, gradients not sent yet)
        mean      differs by rank; another number of ranks starts from their mean (local momentum)
        stripe    each rank has some rows of one whole, in rank order
        scratch   no checkpoint needs it

    Example:
        >>> from dtk.communicators.local import LocalCommunicator
        >>> state = ExchangeState(LocalCommunicator(), "CPU:0")
        >>> state.variable("residual", "sum", (2,)).assign_add([1.0, 2.0]).numpy().tolist()
        [1.0, 2.0]
        >>> state.variable("residual", "sum", (2,)).numpy().tolist()
        [1.0, 2.0]
    """

    def __init__(self, communicator: Communicator, device: str):
        self._communicator = communicator
        self._device = device
        self.prefix = ""
        self._kept: dict[str, _StateVariable] = {}
        self._restored: dict[str, SavedItem] = {}

    @property
    def variables(self) -> list[tf.Variable]:
        """Every variable made or kept so far."""
        return [kept.variable for kept in self._kept.values()]

    def part(self, prefix: str) -> ExchangeState:
        """Return this state with a prefix before every name."""
        part = copy.copy(self)
        part.prefix = self.prefix + prefix
        return part

    def variable(
        self,
        name: str,
        kind: str,
        shape: Sequence[int],
        dtype: tf.DType = tf.float32,
        rows: tuple[int, int] | None = None,
    ) -> tf.Variable:
        """Return the variable of this name; a new one holds zeros, or a checkpoint's values."""

        def make() -> tf.Variable:
            with tf.device(self._device):
                return tf.Variable(tf.zeros(shape, dtype), trainable=False, name=name)

        if self.prefix + name not in self._kept:
            self.keep(name, kind, outside_graph(make), rows)
        return self._kept[self.prefix + name].variable

    def keep(
        self, name: str, kind: str, variable: tf.Variable, rows: tuple[int, int] | None = None
    ) -> None:
        """Save and restore a variable."""
        name = self.prefix + name
        self._kept[name] = kept = _StateVariable(variable, kind, rows)
        saved = self._restored.pop(name, None)
        if saved is not None:
            outside_graph(lambda: self._assign(name, kept, saved))

    def collect(self, root: int | None = None) -> dict[str, SavedItem]:
        """Return the saved variables of all ranks; all ranks call it together."""
        saved = dict(self._restored)  # restored values that no step has asked for yet
        for name, kept in self._kept.items():
            if kept.kind == "scratch":
                continue
            value = tf.convert_to_tensor(kept.variable)
            if kept.kind in ("sum", "mean"):
                value = self._communicator.allgather(value[None])
            elif kept.kind == "stripe":
                value = self._communicator.allgather(value)
            # Checkpoint files have no bfloat16.
            value = tf.cast(value, tf.float32) if value.dtype == tf.bfloat16 else value
            if root in (None, self._communicator.rank):
                saved[name] = {"kind": kept.kind, "value": value.numpy()}
        return saved

    def restore(self, saved: dict[str, SavedItem]) -> None:
        """Restore the result of `collect`, with any number of ranks.

        Variables that no step has asked for yet get their values when a step does.
        """
        self._restored.clear()
        for name, item in saved.items():
            if name in self._kept:
                self._assign(name, self._kept[name], item)
            else:
                self._restored[name] = item

    def _assign(self, name: str, kept: _StateVariable, saved: SavedItem) -> None:
        rank, size = self._communicator.rank, self._communicator.size
        value = np.asarray(saved["value"])
        if kept.kind == "stripe":
            value = value[slice(*kept.rows)] if kept.rows else value
        elif kept.kind != "same" and len(value) == size:
            value = value[rank]
        elif kept.kind != "same":  # saved by another number of ranks
            mean = value.mean(0, dtype=np.float64)
            whole = mean if kept.kind == "mean" else mean * (len(value) / size)
            value = whole.astype(value.dtype)
        if value.shape != tuple(kept.variable.shape):
            raise ValueError(
                f"the checkpoint remembers {name} of shape {value.shape} for the exchange, but "
                f"here it has shape {tuple(kept.variable.shape)}; resume with the exchange that "
                "was saved, or use resume=False and model.load_weights"
            )
        kept.variable.assign(tf.cast(value, kept.variable.dtype))

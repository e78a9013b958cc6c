"""Fewer and smaller messages between workers and parameter servers."""

from __future__ import annotations

from dataclasses import dataclass

from dtk.errors import check_number
from dtk.exchange.quantized import Quantized


@dataclass(frozen=True)
class Downpour:
    """Push every n-th step, fetch every m-th, and send only entries that have changed enough.

    A worker takes `push_every` batches at once. It fetches the weights, trains by plain SGD at the
    optimizer's rate, fetches anew after every `fetch_every` batches, and then pushes the sum of the
    gradients. The optimizer applies this sum once and counts it as `push_every` steps. With
    momentum-free SGD and one step at a time this is plain SGD; but rows of embedding tables stay on
    the servers and change there only. If a worker is lost, no batch is lost: another worker repeats
    its batches.

    With `significant`, a worker keeps back entries that would change a weight by no more than that
    (the gradient's sum times the rate) and adds them to its next push. So a worker holds back at
    most `significant` per weight; this remainder ends with `fit`, is not in checkpoints, and is
    lost with the worker. Large gradients are sent as positions and values of the significant
    entries if that is shorter.

    `bits` sends a code with this many bits for each entry of a kernel; the worker adds the rounding
    error to its next push and keeps it in the same way. `exchange=Quantized(bits)` is short for
    `Downpour(bits=bits)`.

    Args:
        push_every: Steps (batches) in a push.
        fetch_every: Steps between two fetches, a divisor or a multiple of `push_every`; None:
            `push_every`. With a multiple ("async" only), a worker continues with its own weights
            after a push, and the staleness in the logs counts from the fetch.
        significant: Smallest change of a weight worth sending; 0.0 sends all.
        bits: 1 to 16 for each entry of a kernel (see `dtk.exchange.Quantized`); None or 32 sends
            kernels unchanged.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> Downpour(push_every=4, significant=1e-4)
        Downpour(push_every=4, fetch_every=4, significant=0.0001, bits=None)

    Sources: Dean et al. 2012 (Downpour SGD; n_push and n_fetch); Li et al., OSDI'14 (significantly
    modified filter).
    """

    push_every: int = 1
    fetch_every: int | None = None
    significant: float = 0.0
    bits: int | None = None

    def __post_init__(self) -> None:
        if self.fetch_every is None:
            object.__setattr__(self, "fetch_every", self.push_every)
        for name in ("push_every", "fetch_every"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r}; expected a number of steps, 1 or more")
        if self.push_every % self.fetch and self.fetch % self.push_every:
            raise ValueError(
                f"fetch_every={self.fetch_every} is neither a divisor nor a multiple of "
                f"push_every={self.push_every}; use one, or the same"
            )
        expected = "the smallest change of a weight worth sending, 0.0 or more"
        check_number("significant", self.significant, expected, lambda change: change >= 0.0)
        if self.bits is not None:
            if not Quantized(self.bits).codes:
                object.__setattr__(self, "bits", None)
            elif self.significant:
                raise ValueError(
                    f"significant={self.significant} sends single entries, and bits={self.bits} a "
                    "code of all of them; use one of the two"
                )

    @property
    def keeps(self) -> bool:
        """Whether a worker keeps back a part of a push."""
        return bool(self.significant or self.bits)

    @property
    def fetch(self) -> int:
        """Steps between two fetches."""
        return self.fetch_every or self.push_every

"""Delayed proximal gradient: `minimize_blocks`, its checks and its result."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from dtk.errors import check_number
from dtk.nests import Array, Function, Numbers
from dtk.parameter_server import proximal
from dtk.parameter_server.scheduler import Staleness
from dtk.strategies.parameter_server import ParameterServerStrategy

# Allows a rate to exceed its bound by rounding.
_ROUNDING = 1 + 1e-9


@dataclass(frozen=True)
class BlockResult:
    """Result of `minimize_blocks`, with staleness and traffic."""

    weights: Array  # same shape and dtype as the first values
    objective: dict[int, float]  # steps applied -> F(w) after them; 0 is the start
    # how many earlier steps were missing in the weights at which gradients were computed; see
    # `dtk.parameter_server.scheduler.Staleness`
    staleness: Staleness
    # per worker: gradients computed ("steps"), bytes "pulled" from and "pushed" to the servers, and
    # bytes of rows "copied" to it
    traffic: list[dict[str, int]]
    rate: Array  # the rate of each block, of shape (blocks,)


def minimize_blocks(
    strategy: ParameterServerStrategy,
    loss: Function[tf.Tensor],
    weights: Numbers,
    data: Numbers | tuple[Numbers, ...],
    *,
    blocks: int,
    steps: int,
    l1: float = 0.0,
    rate: Numbers | None = None,
    smoothness: Numbers | None = None,
    tau: int = 0,
    order: str | Sequence[int] | Callable[[int], int] = "cyclic",
    seed: int = 0,
    record_every: int | None = None,
    on_record: Callable[[int, float], object] | None = None,
) -> BlockResult:
    """Minimise a loss summed over rows plus `l1 * |weights|_1`, one block of weights a step.

    Call it on the chief, outside the strategy's scope. The rows are cut into one part per worker;
    a part is sent to a worker when the worker first computes it. In each step every part's gradient
    is pushed for one block only, and workers pull only weights updated since: about 1/blocks of the
    weights each way. They still differentiate the whole loss. With tau=0 the result is the same as
    in one process; with more, workers do not wait for each other in every step. If a worker is
    killed, its part goes to another and the result does not change.

    The strategy's consistency only concerns `fit` and does not matter here.

    Args:
        strategy: The strategy whose workers and servers compute.
        loss: Called as `loss(weights, *rows)` with the weights and some rows of `data`, all
            tensors, inside a graph; returns one number per row, of shape (rows,). It must be convex
            for the rate's bound to hold.
        weights: First values, of shape (entries, ...), float32 or float64. Blocks are cut along the
            first axis.
        data: An array, or a tuple of arrays, with the same number of rows; floating-point arrays
            are cast to the dtype of the weights.
        blocks: Number of blocks the weights are cut into, as evenly as possible.
        steps: Number of steps.
        l1: Weight of the L1 norm, at least 0.
        rate: Step size, one number or one per block; None for `rate_bound(smoothness, tau)`.
        smoothness: L of the loss, one number or one per block, for example from
            `least_squares_smoothness`; if given, a rate above the bound is refused.
        tau: Step t starts once every step before t - tau is applied.
        order: "cyclic"; "random", all blocks with equal probability; a sequence of blocks,
            repeated at its end; or a function of the step.
        seed: Seed of the random order.
        record_every: Number of steps between two computations of the objective, which is also
            computed after the last step; None: `blocks`. It costs about a third of a step.
        on_record: Called as `on_record(steps, objective)` each time.

    Returns:
        Weights, objective, staleness and traffic.

    Raises:
        ValueError: An argument is invalid; the message says which and what was expected.
        FloatingPointError: The objective is not a finite number.
        ClusterError: A parameter server or every worker is lost.

    Example:
        >>> def squares(weights, x, y):
        ...     return (tf.linalg.matvec(x, weights) - y) ** 2 / 2
        >>> result = minimize_blocks(  # doctest: +SKIP
        ...     dtk.strategies.ParameterServerStrategy(), squares, np.zeros(64), (x, y),
        ...     blocks=4, steps=1000, l1=10.0, tau=2,
        ...     smoothness=least_squares_smoothness(x, blocks=4),
        ... )

    Source: Li et al., OSDI'14, Algorithm 3; see `dtk.parameter_server.proximal`.
    """
    _check_strategy(strategy)
    weights = _checked_weights(weights)
    proximal.check_blocks(blocks, len(weights))
    proximal.check_tau(tau)
    _check_count("steps", steps)
    _check_count("record_every", blocks if record_every is None else record_every)
    check_number("l1", l1, "a number of 0 or more", lambda weight: weight >= 0)
    rates = _checked_rate(rate, smoothness, blocks, tau)
    chosen = _checked_order(order, blocks, steps, seed)
    rows = _checked_data(data, weights.dtype)

    descent = proximal.BlockDescent(strategy, loss, weights, rows, blocks)
    before = strategy.traffic
    objective: dict[int, float] = {}

    def record(step: int) -> None:
        if step % (record_every or blocks) and step != steps:
            return
        smooth, norm = descent.measure()
        objective[step] = smooth + l1 * norm
        if not math.isfinite(objective[step]):
            raise FloatingPointError(_not_finite(objective[step], step, rates))
        if on_record is not None:
            on_record(step, objective[step])

    schedule = descent.run(chosen, tau, rates, l1, record)
    traffic = [
        {**{name: after[name] - old[name] for name in after}, "copied": copied}
        for after, old, copied in zip(strategy.traffic, before, descent.copied, strict=True)
    ]
    return BlockResult(descent.weights, objective, schedule.statistics, traffic, rates)


def _check_strategy(strategy: tf.distribute.Strategy) -> None:
    if not isinstance(strategy, ParameterServerStrategy):
        raise ValueError(
            f"strategy is {type(strategy).__name__}; blocks of weights live on parameter servers: "
            "use dtk.strategies.ParameterServerStrategy() and `dtk run -n 2 --ps 1 train.py`"
        )
    if strategy.is_evaluator:
        raise ValueError("the evaluator takes no steps; call minimize_blocks on the chief only")
    if tf.distribute.has_strategy():
        raise ValueError(
            "minimize_blocks was called inside strategy.scope(); call it outside: it places blocks "
            "on the servers itself"
        )


def _checked_weights(weights: Numbers) -> Array:
    weights = np.array(weights)
    if weights.dtype not in (np.float32, np.float64) or not weights.ndim or not weights.size:
        raise ValueError(
            f"weights of type {weights.dtype} and shape {weights.shape}; expected float32 or "
            "float64 and at least one axis and one entry, such as np.zeros(64)"
        )
    return weights


def _check_count(name: str, count: int) -> None:
    if not proximal.is_whole(count) or count < 1:
        raise ValueError(f"{name}={count!r}; expected 1 or more")


def _checked_rate(rate: Numbers | None, smoothness: Numbers | None, blocks: int, tau: int) -> Array:
    bound = None
    if smoothness is not None:
        bound = _per_block("smoothness", proximal.rate_bound(np.asarray(smoothness), tau), blocks)
    if rate is None:
        if bound is None:
            raise ValueError(
                "rate=None and smoothness=None; give one: for the loss (x . w - y)^2 / 2, "
                f"smoothness=dtk.strategies.least_squares_smoothness(x, blocks={blocks})"
            )
        return bound
    rates = _per_block("rate", rate, blocks)
    if not (np.all(np.isfinite(rates)) and np.all(rates > 0)):
        raise ValueError(f"rate={rates.tolist()}; expected numbers above 0")
    if bound is not None and np.any(rates > bound * _ROUNDING):
        block = int(np.argmax(rates / bound))
        raise ValueError(
            f"rate={rates[block]:g} of block {block} is above {bound[block]:.4g}, the largest rate "
            f"known to converge with gradients late by tau={tau} steps; leave out the rate, or, to "
            "use it anyway, the smoothness"
        )
    return rates


def _per_block(name: str, values: Numbers, blocks: int) -> Array:
    values = np.asarray(values, np.float64)
    if values.shape not in ((), (blocks,)):
        raise ValueError(
            f"{name} of shape {values.shape}; expected one number, or one for each of the "
            f"{blocks} blocks"
        )
    return np.array(np.broadcast_to(values, (blocks,)))


def _checked_order(
    order: str | Sequence[int] | Callable[[int], int], blocks: int, steps: int, seed: int
) -> list[int]:
    if isinstance(order, str):
        if order not in ("cyclic", "random"):
            raise ValueError(
                f'order={order!r}; expected "cyclic", "random", a sequence of blocks, or a '
                "function of the step"
            )
        if order == "random":
            return np.random.default_rng(seed).integers(0, blocks, steps).tolist()
    listed = range(blocks) if isinstance(order, str) else order
    if callable(listed):
        chosen = [listed(step) for step in range(steps)]
    elif isinstance(listed, Sequence | np.ndarray) and len(listed):
        chosen = [listed[step % len(listed)] for step in range(steps)]
    else:
        raise ValueError(f"order={order!r}; expected at least one block")
    for step, block in enumerate(chosen):
        if not proximal.is_whole(block) or not 0 <= block < blocks:
            raise ValueError(f"order: step {step} is block {block!r}; expected 0 to {blocks - 1}")
    return [int(block) for block in chosen]


def _checked_data(
    data: Numbers | tuple[Numbers, ...], dtype: np.dtype[tf.DType]
) -> tuple[Array, ...]:
    arrays = [np.asarray(array) for array in (data if isinstance(data, tuple | list) else (data,))]
    shapes = ", ".join(str(array.shape) for array in arrays)
    if not arrays or any(not array.ndim for array in arrays):
        raise ValueError(f"data of shapes {shapes or 'none'}; expected arrays of rows")
    if len({len(array) for array in arrays}) > 1 or not len(arrays[0]):
        raise ValueError(
            f"data of shapes {shapes}; expected the same number of rows in each, at least one"
        )
    floats = [np.issubdtype(array.dtype, np.floating) for array in arrays]
    return tuple(
        array.astype(dtype, copy=False) if is_float else array
        for array, is_float in zip(arrays, floats, strict=True)
    )


def _not_finite(objective: float, step: int, rates: Array) -> str:
    if not step:
        return (
            f"the objective is {objective} at the weights given; look for such numbers in the "
            "weights and the data"
        )
    return (
        f"the objective is {objective} after {step} steps at rates up to {rates.max():.4g}; use a "
        "smaller rate, or give the smoothness L and leave the rate out"
    )

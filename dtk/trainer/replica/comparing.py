"""Compare a step that was computed as a whole with the same step computed in parts."""

from __future__ import annotations

from typing import NamedTuple

import keras
import numpy as np

from dtk.compat import keras_models
from dtk.nests import Array
from dtk.trainer.replica.step_trial import Outcome
from dtk.trainer.tracing.loss_terms import RATIO, SUM

# What to change, by what differs.
_LOSSES = (
    "Losses given to compile, and compute_loss, are computed on the rows of all workers where they "
    "do not add up. Any other number must be a mean or a sum over rows, or made of sums by "
    "dtk.layers.sum_over_batch, and rows be compared by dtk.layers.gather_over_batch. With "
    "local steps or jit_compile=True nothing is gathered: there Dice and Tversky need axis=, for "
    "one value per row"
)
_STATE = (
    "Replicas average what they assign, so it must be a mean over rows, or made of sums by "
    "dtk.layers.sum_over_batch; a largest value of a batch is neither. Rows that are kept, as in a "
    "queue, must be those of all workers, by dtk.layers.gather_over_batch. A tf.Variable is not "
    "averaged: make it by self.add_weight"
)
_CHOOSING = (
    "Each call of a step must train the same variables; by turns, as its count of steps says, if "
    "that is self.optimizer.iterations or a number in an attribute of the model, not in a dict"
)


class Difference(NamedTuple):
    """How a step in parts differs from the step as a whole."""

    size: float  # the largest relative difference of a gradient
    wrong: str | None = None  # how training would differ from one process; None if it would not
    cure: str = _LOSSES
    moves: bool = True  # whether any gradient is not zero


def tolerance_of(model: keras.Model) -> float:
    """Return the relative difference of gradients and scalars that may be rounding."""
    kinds = {layer.compute_dtype for layer in keras_models.layers_of(model)}
    return 5e-2 if kinds & {"float16", "bfloat16"} else 1e-4


def _close(one: float, other: float, scale: float, tolerance: float) -> bool:
    return bool(np.abs(one - other) <= tolerance * scale)


def kinds_of(
    whole: Outcome,
    parts: Outcome,
    shares: Array,
    tolerance: float,
    sums: frozenset[str] = frozenset(),
) -> tuple[dict[str, str], list[str], list[str]]:
    """Find the kinds of terms that are not means, the names of unclear terms, and oddities."""
    kinds: dict[str, str] = {}
    unclear: list[str] = []
    odd: list[str] = []
    if whole.terms.keys() != parts.terms.keys():  # replicas' come in any order
        on_all = sorted(parts.terms)
        return {}, [], [f"it has the losses {list(whole.terms)} on one, {on_all} on all"]
    for name, (of_whole, *_) in whole.terms.items():
        values, value = parts.terms[name], of_whole[0]
        present = shares > 0
        each, above, below = (values[present, i] for i in range(3))
        mean, total = (shares[present] * each).sum(), each.sum()
        scale = max(np.abs([value, mean, total, *each]).max(), 1e-30)
        if _is_ratio(of_whole, above, below, tolerance):
            # Even if a mean fits: a mask may keep all of so few rows, or none.
            kinds[name] = RATIO
        elif not np.isfinite([value, *each]).all():
            unclear.append(name)
        elif _close(mean, value, scale, tolerance):
            if _close(total, value, scale, tolerance):
                if name in sums:
                    kinds[name] = SUM
                else:
                    unclear.append(name)
        elif _close(total, value, scale, tolerance):
            kinds[name] = SUM
        else:
            each_value = ", ".join(f"{v:.5g}" for v in each)
            odd.append(
                f"{name} is {value:.5g} on all rows and {each_value} on the parts, neither a mean "
                f"({mean:.5g}) nor a sum ({total:.5g})"
            )
    return kinds, unclear, odd


def _is_ratio(whole: Array, above: Array, below: Array, tolerance: float) -> bool:
    """Return whether a term is a quotient of two sums over rows."""
    _, numerator, denominator = whole
    if not np.isfinite([numerator, denominator, *above, *below]).all():
        return False
    above_scale = max(np.abs([numerator, *above]).max(), 1e-30)
    return _close(above.sum(), numerator, above_scale, tolerance) and _close(
        below.sum(), denominator, max(abs(denominator), 1e-30), tolerance
    )


def compare(whole: Outcome, parts: Outcome, tolerance: float) -> Difference:
    """Return the first difference in gradients or state."""
    if whole.gradients.keys() != parts.gradients.keys():
        return Difference(np.inf, "optimizers were given gradients of other variables", _CHOOSING)
    state = [
        f"the step assigns other values to the variable {name!r}"
        for name, value in whole.state.items()
        if not np.allclose(parts.state.get(name, np.nan), value, tolerance, 1e-6, equal_nan=True)
    ][:1]
    sizes = {name: np.linalg.norm(g) for name, g in whole.gradients.items()}
    # A gradient that cancels out, as of a bias before a batch normalization, is only rounding.
    least = 1e-2 * max(sizes.values(), default=0.0)
    differences = {
        name: float(np.linalg.norm(parts.gradients[name] - g) / max(sizes[name], least, 1e-30))
        for name, g in whole.gradients.items()
    }
    worst = max(differences, key=lambda name: differences[name], default=None)
    difference = differences[worst] if worst is not None else 0.0
    if np.isnan(list(differences.values())).any():
        name = next(name for name, difference in differences.items() if np.isnan(difference))
        return Difference(
            np.nan,
            f"the gradient of {name!r} is not a number on all rows or on a part of them",
            "0 / 0, as where a mask leaves no row, is not a number; tf.math.divide_no_nan gives 0",
        )
    if worst is not None and not difference <= tolerance:
        # A variable that other rows share, as for moments of the batch, tells which layer it is.
        reasons = [f"the gradient of {worst!r} differs by {100 * difference:.3g} %", *state]
        return Difference(difference, "; ".join(reasons))
    for name, squares in whole.squares.items():
        # Squares of gradients that are only rounding are too small to compare.
        size = max(np.linalg.norm(squares), least**2, 1e-30)
        apart = float(np.linalg.norm(parts.squares[name] - squares) / size)
        if not apart <= 4 * tolerance:
            return Difference(
                apart,
                f"the slices of the gradient of {name!r} differ: their sums are equal, but this "
                "optimizer squares or clips slices one by one, and their squares differ by "
                f"{100 * apart:.3g} %",
                "One process sums slices that belong to no row of the batch before it squares "
                "them (keras.optimizers.SGD without clipping makes no difference; "
                "run_eagerly=True hides how indices are computed)",
            )
    moves = any(sizes.values()) or not sizes
    if state:
        return Difference(difference, state[0], _STATE, moves)
    return Difference(difference, moves=moves)


def notes_of(whole: Outcome, parts: Outcome, tolerance: float) -> list[str]:
    notes = []
    for name, value in whole.logs.items():
        theirs = parts.logs.get(name, np.nan)
        if not np.allclose(theirs, value, tolerance, 1e-6, equal_nan=True):
            notes.append(
                f"{name!r} is neither a mean nor a sum over rows ({np.ravel(value)[0]:.5g} on all "
                f"rows of a trial, {np.ravel(theirs)[0]:.5g} from its parts), so the logged value "
                "differs from one process's; weights are not affected"
            )
    for name, value in whole.others.items():
        if not _same(value, parts.others.get(name), tolerance):
            notes.append(
                f"{name!r} in the logs is not one number but {value.dtype} of shape {value.shape}, "
                "and depends on the rows: a worker logs that of its own rows, not of all; weights "
                "are not affected"
            )
    return notes


def _same(one: Array, other: Array | None, tolerance: float) -> bool:
    if other is None or one.shape != other.shape:
        return False
    if one.dtype.kind in "biuf":
        return np.allclose(other, one, tolerance, 1e-6, equal_nan=True)
    return np.array_equal(one, other)

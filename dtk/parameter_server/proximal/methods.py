"""Delayed proximal gradient: sparse linear models, block by block, on parameter servers.

Minimises, over weights w cut into blocks w_1, ..., w_B, a smooth loss summed over rows plus an L1
norm:

    F(w) = sum over rows of loss(w; row) + l1 * |w|_1

Step t takes a block b = b(t), sums its gradient g over all rows, and applies the proximal operator
of the L1 norm, which is soft thresholding:

    w_b <- argmin_x  rate * l1 * |x|_1 + 1/2 |x - (w_b - rate * g)|^2
         = soft_threshold(w_b - rate * g, rate * l1)

The gradient may be late: step t starts once every step before t - tau is applied. The rate must be
small enough. Let the loss be convex, let L_b bound the curvature of the sum of losses in block b,
and let d_t be the change of step t. An undelayed step lowers F by at least (1/rate - L_b/2)
|d_t|^2. A step s at most tau before or after t costs at most sqrt(L_b L_c) |d_t| |d_s| <= (L_b
|d_t|^2 + L_c |d_s|^2) / 2, if the later of the two has a gradient without the change of the other;
each pair costs once, and there are 2 tau pairs with t. So the sum of all steps lowers F if 1/rate >
(1/2 + tau) L_b, for which the rate of the paper is enough:

    rate_b <= 1 / ((1 + tau) L_b + epsilon)

Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI'14,
Algorithm 3, without its diagonal second-order term and its filter.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from dtk.even_division import even_bounds
from dtk.nests import Array, Numbers


def soft_threshold(values: Numbers, threshold: Numbers) -> tf.Tensor:
    """Apply the proximal operator of `threshold * |x|_1`: argmin over x of |x - v|^2 / 2 + t |x|_1.

    Example:
        >>> soft_threshold(np.array([3.0, -0.5, -2.0]), 1.0).numpy().tolist()
        [2.0, 0.0, -1.0]
    """
    values = tf.convert_to_tensor(values)
    threshold = tf.convert_to_tensor(threshold, values.dtype)
    return values - tf.clip_by_value(values, -threshold, threshold)


def least_squares_smoothness(features: Numbers, blocks: int = 1) -> Array:
    """Return L_b of the loss (x . w - y)^2 / 2: the largest eigenvalue of X_b^T X_b.

    Without the factor 1/2 in the loss it is twice that.

    Args:
        features: X, of shape (rows, entries).
        blocks: Number of blocks of entries that X is cut into.

    Returns:
        L, of shape (blocks,).

    Raises:
        ValueError: X is not a matrix, or has fewer entries than there are blocks.

    Example:
        >>> least_squares_smoothness([[3.0, 0.0], [0.0, 2.0]], blocks=2)
        array([9., 4.])
    """
    features = np.asarray(features)
    if features.ndim != 2:
        raise ValueError(f"features of shape {features.shape}; expected (rows, entries)")
    check_blocks(blocks, features.shape[1])
    spans = [even_bounds(features.shape[1], block, blocks) for block in range(blocks)]
    return np.array([np.linalg.norm(features[:, begin:end], 2) ** 2 for begin, end in spans])


def rate_bound(smoothness: Numbers, tau: int, epsilon: float = 1e-6) -> Array:
    """Return the largest rate with which delayed block steps are known to converge.

    Args:
        smoothness: L_b, which bounds the curvature of the sum of losses in block b; a number, or
            one per block.
        tau: How many steps a gradient may be late.
        epsilon: Added to the denominator, as a part of the largest L, so that a block without
            curvature, L_b = 0, has a rate, too.

    Returns:
        1 / ((1 + tau) L + epsilon max L), of the shape of `smoothness`.

    Raises:
        ValueError: tau < 0, or no L above 0.

    Example:
        >>> rate_bound([9.0, 4.0], tau=1, epsilon=0).tolist()
        [0.05555555555555555, 0.125]
    """
    check_tau(tau)
    smoothness = np.asarray(smoothness, np.float64)
    if not (np.all(np.isfinite(smoothness)) and np.all(smoothness >= 0) and np.any(smoothness)):
        raise ValueError(f"smoothness={smoothness.tolist()}; expected numbers above 0")
    return 1 / ((1 + tau) * smoothness + epsilon * np.max(smoothness))


def check_blocks(blocks: int, entries: int) -> None:
    """Raise unless weights of so many entries can be cut into so many blocks."""
    if not is_whole(blocks) or not 1 <= blocks <= entries:
        raise ValueError(
            f"blocks={blocks!r} for weights of {entries} entries along the first axis; expected "
            f"1 to {entries}"
        )


def check_tau(tau: int) -> None:
    """Raise unless `tau` is a whole number of 0 or more."""
    if not is_whole(tau) or tau < 0:
        raise ValueError(f"tau={tau!r}; expected 0 or more: the steps a gradient may be late")


def is_whole(number: object) -> bool:
    """Return whether a value is an integer and not a bool."""
    return isinstance(number, int | np.integer) and not isinstance(number, bool)

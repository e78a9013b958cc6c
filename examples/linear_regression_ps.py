"""Sparse linear regression with the weights on parameter servers, block by block.

    dtk run -n 2 --ps 2 examples/linear_regression_ps.py
    dtk run -n 2 --ps 2 examples/linear_regression_ps.py --tau 0 --blocks 1     # proximal gradient
    dtk run -n 4 --ps 2 examples/linear_regression_ps.py --tau 6 --l1 3000

Predicts how diabetes progresses from ten measurements of 442 patients and all products of two of
them. Delayed proximal gradient (Li et al., OSDI'14, Algorithm 3): a step updates one block of the
weights from the gradients of all workers, which may be late by up to tau steps; the L1 norm makes
most weights exactly zero. The result is scikit-learn's Lasso.
"""

import argparse

import dtk
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_diabetes
from sklearn.linear_model import Lasso
from sklearn.preprocessing import PolynomialFeatures, StandardScaler

parser = argparse.ArgumentParser(description="Lasso on parameter servers.")
parser.add_argument("--tau", type=int, default=2, help="steps a gradient may be late")
parser.add_argument("--blocks", type=int, default=4, help="how many the weights are cut into")
parser.add_argument("--l1", type=float, default=1000.0, help="weight of the L1 norm")
parser.add_argument("--steps", type=int, default=1200)
args = parser.parse_args()

strategy = dtk.strategies.ParameterServerStrategy()

x, y = load_diabetes(return_X_y=True)
x = StandardScaler().fit_transform(PolynomialFeatures(2, include_bias=False).fit_transform(x))
y = y - y.mean()


def squared_error(weights, x, y):
    """Half the squared error of each row."""
    return (tf.linalg.matvec(x, weights) - y) ** 2 / 2


result = dtk.strategies.minimize_blocks(
    strategy,
    squared_error,
    np.zeros(x.shape[1]),
    (x, y),
    blocks=args.blocks,
    steps=args.steps,
    l1=args.l1,
    tau=args.tau,
    smoothness=dtk.strategies.least_squares_smoothness(x, args.blocks),
    record_every=max(args.steps // 6, 1),
    on_record=lambda step, objective: print(f"step {step:5d}: objective {objective:.0f}"),
)

# Its objective is ours divided by the number of rows.
lasso = Lasso(args.l1 / len(x), fit_intercept=False, tol=1e-8, max_iter=100_000).fit(x, y)
best = ((x @ lasso.coef_ - y) ** 2).sum() / 2 + args.l1 * np.abs(lasso.coef_).sum()
print(
    f"{np.count_nonzero(result.weights)} of {x.shape[1]} weights are not zero; "
    f"scikit-learn's Lasso has {np.count_nonzero(lasso.coef_)}"
)
print(f"objective / scikit-learn's {result.objective[args.steps] / best:.6f}")
print(f"staleness: mean {result.staleness.mean:.2f}, at most {result.staleness.max} steps")
whole = result.weights.nbytes
for index, worker in enumerate(result.traffic):
    steps = max(worker["steps"], 1)
    print(
        f"worker {index}: {worker['steps']} gradients, pulled {worker['pulled'] / steps:.0f} and "
        f"pushed {worker['pushed'] / steps:.0f} of {whole} bytes for each"
    )

"""Predictions of `dtk plan`: time, efficiency and cost of a step on any number of workers.

    inputs                    the user's numbers:       "85ms", "1Gbit/s", links, hosts, prices
    calibration               the same, measured:       from the file of `dtk bench`
    dtk.communicators.costs   costs of a collective:    messages one after the other, and bytes
    plan_methods              what dtk does in a step:  strategies and exchanges
    tables                    the output, and which method to use

The predictions use measured numbers only; they run nothing and do not import TensorFlow. Their
formulas are in docs/command-line.md, their errors in benchmarks/results/plan.md.
"""

"""Predictions of `dtk plan`: time, efficiency and cost of a step on any number of workers.

    quantity -> inputs        what a user says:         "85ms", "1Gbit/s", links, hosts, prices
    calibration               what `dtk bench` found:   the same, from its file
    dtk.communicators.costs   what a collective takes:  messages one after the other, and bytes
    methods                   what dtk would do:        strategies and exchanges, step by step
    advice, tables            what is said about it

    model                     the same question of one network, layer by layer (`--model`)

A model with no more in it than what is measured: no TensorFlow, and nothing is run. Its formulas
are in docs/command-line.md; benchmarks/results/plan.md has how far they were off.
"""

from dtk.planning.model.plans import ModelPlan, load_plan

__all__ = ["ModelPlan", "load_plan"]

"""Measurements of `dtk bench`: how they are taken, and how they are shown.

    command line    turns ──> results ──> report, page
                      │ what to measure next, asked of `bench_jobs` by `ranks`
    every rank      worker ──> a BenchWorker: of `variant` (models), or a peer's

Only `variant` imports TensorFlow.
"""

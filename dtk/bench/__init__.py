"""Measurements of `dtk bench`: how they are taken, and how they are shown.

    command line    setting ──> measure ──> results ──> report, plot
                                   │ what to measure next, asked of `process_world`
    every rank      agent ──> worker ──> a Worker: strategy_worker or no_communication_worker
                                         (variant, models), or a baseline's (see `baselines`)

`setting`, `measure`, `results`, `report`, `plot`, `agent`, `baselines` and `worker` import no
TensorFlow.
"""

"""Measurements of `dtk bench`: how they are taken, and how they are shown.

    command line    setting ──> measure ──> results ──> report, plot
                                   │ what to measure next, asked of `process_world`
    every rank      agent ──> baselines.worker ──> a Worker: strategy_worker or
                                                   no_communication_worker (variant, models),
                                                   or a baseline's (baselines.torch_ddp ...)

`setting`, `measure`, `results`, `report`, `plot`, `agent` and `baselines.worker` import no
TensorFlow.
"""

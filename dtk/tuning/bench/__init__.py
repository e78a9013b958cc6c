"""What `dtk bench` measures, how, and what it says about it.

    command line   setting ──────────────────────────────> results -> report
                      │ started as `dtk run` starts a script  ^
    every worker      └──> models -> contender -> measure ────┘ a line for each turn, from rank 0

`setting`, `results` and `report` import no TensorFlow: the command line's process uses them.
"""

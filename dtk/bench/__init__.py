"""What `dtk bench` measures, how, and what it says about it.

    command line    setting ──> measure ──> results ──> report, plot
                                   │ turns, given to the worlds in `dtk.bench.process_world`
    every rank      seat ──> peers.turns ──> a Member: of dtk (member, limit: contender, models)
                                             or of a peer (peers.torch_ddp ...)

`setting`, `measure`, `results`, `report`, `plot`, `seat` and `peers.turns` import no TensorFlow.
"""

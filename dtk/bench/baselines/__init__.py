"""Libraries dtk is measured against: each a `Worker` in a file of its own, served by `worker`.

A baseline runs in its own environment, where dtk need not be, started as
`python baselines/worker.py torch_ddp SETTING`. It trains the models of `dtk.bench.models`, with
plain SGD at the same batch size and on rows of the same shape, as its own documentation would.
"""

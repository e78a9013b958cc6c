"""Block updates that go on while a worker is killed and comes back.

dtk run -n 2 --ps 2 losing_blocks.py
"""

import time

import dtk

from strategies import served_bodies
from strategies.block_problem import BLOCKS, L1, problem, squares

STEPS = 600

strategy = dtk.strategies.ParameterServerStrategy()
x, y, start = problem()
before = 0
back = False


def on_record(step, objective):
    """Kill worker 1 at step 20, and give it time to come back."""
    global before, back
    if step == 20:
        served_bodies.task("worker", 1).kill()
        before = strategy.traffic[1]["steps"]
    if step > 20 and not back:
        # One step may have been under way.
        back = strategy.traffic[1]["steps"] > before + 1
        time.sleep(0.25)


result = dtk.strategies.minimize_blocks(
    strategy,
    squares,
    start,
    (x, y),
    blocks=BLOCKS,
    steps=STEPS,
    l1=L1,
    smoothness=dtk.strategies.least_squares_smoothness(x, BLOCKS),
    record_every=5,
    on_record=on_record,
)
print("steps", STEPS)
print("weights", *(repr(float(weight)) for weight in result.weights))
print("worker 1 came back", back)

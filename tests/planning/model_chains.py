"""Random models as operators, and what computing them takes, for tests of `dtk plan --model`."""

import dataclasses

from hypothesis import strategies as st

from dtk.planning.inputs import Cluster, Link, Software
from dtk.planning.model.layer_costs import WHOLE, Operator, Workload


@dataclasses.dataclass(frozen=True)
class Table:
    """Seconds of a row, by operator and split; an update takes as long for every entry."""

    seconds_of_row: dict
    update: float = 1e-9
    spread: float = 0.0
    told: str = "Computing: by a table."

    def seconds(self, operator, rows, part=WHOLE):
        return rows * self.seconds_of_row[operator.name, part[0]]


TIMES = st.floats(1e-5, 1e-3)
WAYS = ("whole", "output", "input", "rows", "columns")


@st.composite
def workloads(draw, most=5, residual=False):
    """A chain of layers, maybe with a connection around one of them."""
    operators = [Operator("x", (), (), (16, 16, 4), differentiated=False)]
    for number in range(draw(st.integers(1, most))):
        before = operators[-1]
        kind = draw(st.sampled_from(["Conv2D", "ReLU", "Flatten"]))
        taken, differentiated = before.output, any(one.weights for one in operators)
        common = {"sources": (number,), "taken": (taken,), "differentiated": differentiated}
        name = f"{kind}{number}"
        if kind == "Conv2D":
            channels = draw(st.sampled_from([4, 8, 32]))
            kernel = 9 * taken[-1] * channels
            one = Operator(
                name,
                output=(16, 16, channels),
                weights=kernel + channels,
                kernel=kernel,
                tensors=2,
                flops=2.0 * 256 * kernel,
                limits={"output": channels, "input": taken[-1], "rows": 16},
                halos={"rows": (1, 1)},
                **common,
            )
        elif kind == "ReLU":
            one = Operator(name, output=taken, follows=True, limits={"rows": 16}, **common)
        else:
            one = Operator(name, output=taken, whole_because="test", **common)
        operators.append(one)
    if residual and len(operators) > 2:
        ends = (draw(st.integers(1, len(operators) - 2)), len(operators) - 1)
        if operators[ends[0]].output == operators[ends[1]].output:
            taken = tuple(operators[end].output for end in ends)
            limits = {"rows": 16}
            operators.append(
                Operator("add", ends, taken, taken[0], follows=True, limits=limits)
            )
    seconds = {(one.name, way): draw(TIMES) for one in operators for way in WAYS}
    software = Software(message=draw(st.floats(0, 1e-3)), byte=draw(st.floats(1e-10, 1e-8)))
    cluster = Cluster(Link(1e-4, 1e8), per_host=draw(st.integers(1, 4)), software=software)
    outputs = (len(operators) - 1,)
    return Workload(operators, outputs, draw(st.integers(4, 32)), Table(seconds), cluster)

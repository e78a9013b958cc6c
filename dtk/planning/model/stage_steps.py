"""Tasks of a step of a pipeline: stages on ranks, microbatches one behind the other.

    compute 0  | f0 | f1 |              | b1 | b0 |  gradients of replicas | update |
    compute 1       | f0 | f1 | loss | b1 | b0 |

The order in which a stage computes is that of `dtk.layers.Pipeline`: GPipe's (Huang et al. 2019,
arXiv:1811.06965), or one forward and one backward in turn (Narayanan et al. 2021,
arXiv:2006.09503).
"""

from __future__ import annotations

from dataclasses import dataclass

from dtk.communicators.costs import Traffic
from dtk.layers.pipelining.schedule import Pass, ScheduleSlot, gpipe, one_forward_one_backward
from dtk.planning.model.layer_costs import Seconds, Work, Workload
from dtk.planning.model.operators import FLOAT, consumers
from dtk.planning.model.split_steps import allreduce_buckets
from dtk.planning.model.timeline import Task, Tasks
from dtk.planning.model.topology import Grid, group

SCHEDULES = ("gpipe", "1f1b")


@dataclass(frozen=True)
class Stages:
    """A model cut into stages."""

    begins: tuple[int, ...]  # position of the first operator of each stage; 0 first
    microbatches: int  # into how many parts a replica's rows are cut
    schedule: str  # "gpipe" or "1f1b"


@dataclass(frozen=True)
class StageStep:
    """A step of a pipeline."""

    tasks: list[Task]  # of all stages of one replica
    computing: tuple[float, ...]  # seconds of each stage, of all its microbatches
    memory: float  # bytes of the rank with most
    sent: float  # bytes that the rank that sends most sends


def cuts(workload: Workload) -> list[int]:
    """Return the positions before which a model can be cut: one output crosses."""
    operators, takers = workload.operators, consumers(workload.operators)
    found = []
    for begin in range(1, len(operators)):
        crossing = [one for one in range(begin) if any(taker >= begin for taker in takers[one])]
        if len(crossing) == 1 and not operators[crossing[0]].is_input:
            found.append(begin)
    last = (len(operators) - 1,)
    return found if workload.outputs == last else []


class StageCosts:
    """Costs of a workload's stages on a grid whose models are pipelines."""

    def __init__(self, workload: Workload, grid: Grid) -> None:
        self.workload, self.grid = workload, grid
        self._model = group(grid.models(), workload.cluster)
        self._data = group(grid.replicas(), workload.cluster)
        self._rows = grid.rows(workload.batch)
        self._sums: dict[int, list[Seconds]] = {}

    def seconds(self, begin: int, end: int, microbatches: int) -> Seconds:
        """Return the seconds of operators `[begin, end)` for one microbatch."""
        sums = self._cumulated(microbatches)
        return Seconds(
            sums[end].forward - sums[begin].forward, sums[end].backward - sums[begin].backward
        )

    def weights(self, begin: int, end: int) -> int:
        """Return the entries of trainable weights of operators `[begin, end)`."""
        return sum(one.weights for one in self.workload.operators[begin:end])

    def step(self, stages: Stages) -> StageStep:
        """Return the tasks of a step."""
        return _StepOfStages(self, stages).build()

    def sending(self, begin: int, microbatches: int) -> Traffic:
        """Return the traffic of what crosses a cut, one way, for one microbatch."""
        takers = consumers(self.workload.operators)
        source = max(one for one in range(begin) if takers[one] and takers[one][-1] >= begin)
        entries = self.workload.operators[source].entries
        return Traffic(1, FLOAT * entries * self.rows(microbatches))

    def rows(self, microbatches: int) -> int:
        """Return the rows of the largest microbatch."""
        return -(-self._rows // microbatches)

    def send_seconds(self, traffic: Traffic) -> float:
        """Return the seconds of traffic between stages."""
        return self._model.seconds(traffic)

    def add_allreduce(
        self, tasks: Tasks, stage: int, weights: int, last: int
    ) -> tuple[list[int], float]:
        """Add the all-reduce of a stage's gradients over replicas."""
        link = ("link", stage)
        sums = allreduce_buckets(tasks, self._data, [(FLOAT * weights, last)], last, 0.0, link)
        return sums, self._data.allreduce(FLOAT * weights).bytes

    def outputs(self) -> Traffic:
        """Return the traffic of giving all ranks of a model its outputs."""
        entries = self.workload.operators[-1].entries
        return Traffic(1, (self.grid.model - 1) * FLOAT * entries * self._rows)

    def _cumulated(self, microbatches: int) -> list[Seconds]:
        rows = self.rows(microbatches)
        if rows not in self._sums:
            sums = [Seconds(0.0, 0.0)]
            for operator in self.workload.operators:
                one = self.workload.seconds(operator, Work("whole", 1, rows))
                sums.append(
                    Seconds(sums[-1].forward + one.forward, sums[-1].backward + one.backward)
                )
            self._sums[rows] = sums
        return self._sums[rows]


class _StepOfStages:
    """The tasks of one step, as they are made."""

    def __init__(self, costs_of: StageCosts, stages: Stages) -> None:
        self._costs, self._stages = costs_of, stages
        count = len(costs_of.workload.operators)
        self._bounds = list(zip(stages.begins, [*stages.begins[1:], count], strict=True))
        self._tasks = Tasks()
        self._ends: dict[
            tuple[int, ScheduleSlot], int
        ] = {}  # with what has arrived at the next stage
        self._before: list[int | None] = [None] * len(self._bounds)
        self._loss: int | None = None

    def build(self) -> StageStep:
        """Add the slots of all stages, each as soon as those it waits for are there."""
        pending = [self._order(stage) for stage in range(len(self._bounds))]
        while any(pending):
            added = False
            for stage, slots in enumerate(pending):
                while slots and self._has_inputs(stage, slots[0]):
                    self._add(stage, slots.pop(0))
                    added = True
            if not added:  # GPipe's backward passes wait for the loss of all microbatches
                self._add_outputs()
        if self._loss is None:
            self._add_outputs()
        return self._result()

    def _order(self, stage: int) -> list[ScheduleSlot]:
        many = self._stages.microbatches
        if self._stages.schedule == "gpipe":
            return gpipe(many)
        return one_forward_one_backward(stage, len(self._bounds), many)

    def _has_inputs(self, stage: int, slot: ScheduleSlot) -> bool:
        last = len(self._bounds) - 1
        if slot.direction is Pass.FORWARD:
            return stage == 0 or (stage - 1, slot) in self._ends
        if self._stages.schedule == "gpipe" and self._loss is None:
            return False
        return stage == last or (stage + 1, slot) in self._ends

    def _add(self, stage: int, slot: ScheduleSlot) -> None:
        many = self._stages.microbatches
        forward = slot.direction is Pass.FORWARD
        seconds = self._costs.seconds(*self._bounds[stage], many)
        neighbour = stage - 1 if forward else stage + 1
        given = self._ends.get((neighbour, slot))
        name = f"stage {stage} {slot.direction.value} {slot.microbatch}"
        took = seconds.forward if forward else seconds.backward
        loss = None if forward else self._loss
        waits = (self._before[stage], given, loss)
        done = self._tasks.add(name, ("compute", stage), took, *waits)
        self._before[stage] = done
        to = stage + 1 if forward else stage - 1
        if 0 <= to < len(self._bounds):
            border = self._bounds[max(stage, to)][0]
            sending = self._costs.send_seconds(self._costs.sending(border, many))
            done = self._tasks.add(f"{name} sent", ("link", stage), sending, done)
        self._ends[stage, slot] = done

    def _add_outputs(self) -> None:
        """Add the last stage's giving its outputs to all, which all wait for."""
        last = len(self._bounds) - 1
        seconds = self._costs.send_seconds(self._costs.outputs())
        self._loss = self._tasks.add("outputs", ("link", last), seconds, *self._before)

    def _result(self) -> StageStep:
        computing, memory, sent = [], [], []
        costs_of, many = self._costs, self._stages.microbatches
        workload = costs_of.workload
        for stage, (begin, end) in enumerate(self._bounds):
            weights = costs_of.weights(begin, end)
            last = self._before[stage]
            assert last is not None
            sums, bytes_of_sum = costs_of.add_allreduce(self._tasks, stage, weights, last)
            took = weights * workload.computing.update
            self._tasks.add("update", ("compute", stage), took, last, self._loss, *sums)
            computing.append(many * costs_of.seconds(begin, end, many).both)
            memory.append(self._memory(stage))
            sent.append(bytes_of_sum + self._sent(stage))
        return StageStep(self._tasks.found, tuple(computing), max(memory), max(sent))

    def _sent(self, stage: int) -> float:
        many, total = self._stages.microbatches, 0.0
        if stage > 0:  # gradients back
            total += many * self._costs.sending(self._bounds[stage][0], many).bytes
        if stage < len(self._bounds) - 1:
            total += many * self._costs.sending(self._bounds[stage + 1][0], many).bytes
        else:
            total += self._costs.outputs().bytes
        return total

    def _memory(self, stage: int) -> float:
        """Return the bytes of weights, and of what microbatches under way need backwards."""
        workload, many = self._costs.workload, self._stages.microbatches
        operators = workload.operators[slice(*self._bounds[stage])]
        under_way = many
        if self._stages.schedule == "1f1b":
            under_way = min(many, len(self._bounds) - stage)
        rows = min(under_way * self._costs.rows(many), self._costs.rows(1))
        weights = sum(one.weights * (2 + workload.slots) + one.fixed for one in operators)
        return FLOAT * (weights + rows * sum(one.entries for one in operators))

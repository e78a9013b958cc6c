"""Tasks of a step on a grid of replicas and of ranks that share layers.

All ranks have as much to do as the busiest one, so one of them is simulated:

    compute   | forward of each layer ... | backward of each, from the last | (rest of) | update |
    link        gathers, sums, halos          the same of gradients, buckets   buckets

Gradients of replicas travel in buckets, in the order in which they are there. What of their bytes a
backward pass hides is measured (`Software.hidden`); the rest, and messages, come after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dtk.communicators import costs
from dtk.communicators.costs import BUCKET_MOST, Traffic, half_length
from dtk.planning.model.layer_costs import LayerCost, LayerCosts
from dtk.planning.model.operators import FLOAT, Layout, Split
from dtk.planning.model.timeline import Resource, Task, Tasks
from dtk.planning.model.topology import Group

COMPUTE: Resource = ("compute", 0)
LINK: Resource = ("link", 0)
# Names of the tasks that carry gradients: beside the backward pass, and behind it.
BUCKETS = ("a bucket of gradients", "the rest of the gradients")

Splits = Sequence[Split]


class Step(NamedTuple):
    """A step of a choice of splits."""

    tasks: list[Task]  # of one rank
    layers: list[LayerCost]  # costs of each operator
    memory: float  # bytes of a rank
    sent: float  # bytes that a rank sends


def layer_costs(costs_of: LayerCosts, splits: Splits) -> list[LayerCost]:
    """Return the cost of each operator."""
    layouts: list[Layout] = []
    found: list[LayerCost] = []
    for position, split in enumerate(splits):
        sources = costs_of.workload.operators[position].sources
        found.append(costs_of.cost(position, split, [layouts[one] for one in sources]))
        layouts.append(costs_of.layout(position, split))
    return found


def step(costs_of: LayerCosts, splits: Splits) -> Step:
    """Return the tasks of a step."""
    workload, layers = costs_of.workload, layer_costs(costs_of, splits)
    tasks = Tasks()
    ends = _forward(tasks, costs_of, splits, layers)
    loss, gathered = _outputs(tasks, costs_of, splits, ends)
    backwards = _backward(tasks, costs_of, layers, loss)
    sizes = [FLOAT * layer.held for layer in layers]
    order = sorted(backwards, reverse=True)
    last = tasks.add("backward has ended", COMPUTE, 0.0, *backwards.values(), loss)
    reduced = allreduce_buckets(
        tasks,
        costs_of.data,
        [(sizes[position], backwards[position]) for position in order],
        last,
        workload.cluster.software.hidden,
    )
    held = sum(layer.held for layer in layers)
    kernels = [number for number, task in enumerate(tasks.found) if task.name.endswith(_KERNEL)]
    tasks.add("update", COMPUTE, held * workload.computing.update, last, *reduced, *kernels)
    sent = gathered.bytes + costs_of.data.allreduce(sum(sizes)).bytes
    for layer in layers:
        sent += layer.sends.waited_for.bytes + layer.sends.kernel.bytes
    return Step(tasks.found, layers, sum(layer.memory for layer in layers), sent)


_KERNEL = " kernel"


def _forward(
    tasks: Tasks, costs_of: LayerCosts, splits: Splits, layers: Sequence[LayerCost]
) -> list[int]:
    """Add the forward pass; return, by operator, the task that ends with its output."""
    ends: list[int] = []
    for position, layer in enumerate(layers):
        operator = costs_of.workload.operators[position]
        sources = [ends[one] for one in operator.sources]
        seconds = costs_of.model.seconds
        begin = _send(tasks, f"{operator.name} takes", seconds(layer.sends.before), sources)
        done = tasks.add(operator.name, COMPUTE, layer.computing.forward, *begin)
        ends += _send(tasks, f"{operator.name} gives", seconds(layer.sends.after), [done])
    return ends


def _outputs(
    tasks: Tasks, costs_of: LayerCosts, splits: Splits, ends: Sequence[int]
) -> tuple[int, Traffic]:
    """Add what makes outputs whole; return the task at which the loss is there."""
    gathered, begin = Traffic(), []
    for position in costs_of.workload.outputs:
        layout = costs_of.layout(position, splits[position])
        traffic = costs_of.gathered(position, layout)
        gathered = gathered.and_then(traffic)
        seconds = costs_of.model.seconds(traffic)
        begin += _send(tasks, "outputs", seconds, [ends[position]])
    return tasks.add("loss", COMPUTE, 0.0, *begin), gathered


def _backward(
    tasks: Tasks, costs_of: LayerCosts, layers: Sequence[LayerCost], loss: int
) -> dict[int, int]:
    """Add the backward pass; return, by operator, the task that ends with its gradients."""
    workload = costs_of.workload
    hidden = workload.cluster.software.hidden
    upstream: list[list[int]] = [[] for _ in layers]
    for position in workload.outputs:
        upstream[position].append(loss)
    found: dict[int, int] = {}
    for position in reversed(range(len(layers))):
        operator, sends = workload.operators[position], layers[position].sends
        if operator.is_input or not (operator.weights or operator.differentiated):
            continue
        seconds = costs_of.model.seconds
        begin = upstream[position] or [loss]
        begin = _send(tasks, f"{operator.name} takes dy", seconds(sends.back_before), begin)
        backward = layers[position].computing.backward
        done = tasks.add(f"{operator.name} backward", COMPUTE, backward, *begin)
        found[position] = done
        passed = _send(tasks, f"{operator.name} gives dx", seconds(sends.back_after), [done])
        kernel = seconds(sends.kernel)
        if kernel:
            if hidden:
                tasks.add(f"{operator.name}{_KERNEL}", LINK, hidden * kernel, done)
            shown = (1 - hidden) * kernel
            found[position] = passed[0] = _send(
                tasks, f"{operator.name} rest of{_KERNEL}", shown, passed
            )[0]
        for source in operator.sources:
            upstream[source].append(passed[0])
    return found


def _send(tasks: Tasks, name: str, seconds: float, after: Sequence[int]) -> list[int]:
    """Add what is sent, if something is; return what is to be waited for."""
    return [tasks.add(name, LINK, seconds, *after)] if seconds else list(after)


def allreduce_buckets(
    tasks: Tasks,
    replicas: Group,
    gradients: Sequence[tuple[float, int]],
    last: int,
    hidden: float,
    link: Resource = LINK,
) -> list[int]:
    """Add the all-reduces of gradients over replicas."""
    total = sum(size for size, _ in gradients)
    traffic = replicas.allreduce(total)
    if not traffic.messages:
        return []
    length = half_length(replicas.message, replicas.byte)
    limit = min(BUCKET_MOST, costs.bucket(total, length))
    buckets: list[tuple[float, int]] = []
    filled = 0.0
    for size, ready in gradients:
        filled += size
        if filled >= limit:
            buckets.append((filled, ready))
            filled = 0.0
    if not filled and buckets:
        buckets.pop()  # what is there last has nothing to hide behind
    found, early = [], 0.0
    for size, ready in buckets:
        part = hidden * size / total
        early += part
        if part:
            found.append(tasks.add(BUCKETS[0], link, part * traffic.bytes * replicas.byte, ready))
    rest = replicas.seconds(Traffic(traffic.messages, (1 - early) * traffic.bytes))
    return [*found, tasks.add(BUCKETS[1], link, rest, last)]

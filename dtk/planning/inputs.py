"""Inputs of a plan, and how users write them: the job, hosts and links, costs of software."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from dtk.communicators.costs import FLOPS_PER_BYTE, Traffic, half_length
from dtk.errors import DtkError

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_COUNTS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9}
_BITS = {"bit/s": 1.0, "kbit/s": 1e3, "Mbit/s": 1e6, "Gbit/s": 1e9}
_BYTES = {"B/s": 1.0, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9}


class PlanError(DtkError, ValueError):
    """The inputs do not make a plan."""


def parse_seconds(option: str, text: str, zero: str | None = None) -> float:
    """Read a duration, 0 or more; above 0 if `zero` says why.

    Example:
        >>> parse_seconds("--step-time", "85ms")
        0.085
    """
    return _parse(option, text, _SECONDS, "85ms", zero)


def parse_count(option: str, text: str) -> int:
    """Read a whole number, 1 or more.

    Example:
        >>> parse_count("--parameters", "270k"), parse_count("--parameters", "1.5B")
        (270000, 1500000000)
    """
    value = _parse(option, text, _COUNTS, "270k")
    if value < 1 or abs(value - round(value)) > 1e-6:
        raise PlanError(f"{option} {text}: expected a whole number, 1 or more, such as 270k")
    return round(value)


def parse_bandwidth(option: str, text: str) -> float:
    """Read a bandwidth, above 0.

    Example:
        >>> parse_bandwidth("--bandwidth", "1Gbit/s"), parse_bandwidth("--bandwidth", "12.5MB/s")
        (125000000.0, 12500000.0)
    """
    units = {unit: scale / 8 for unit, scale in _BITS.items()} | _BYTES
    return _parse(option, text, units, "1Gbit/s", zero="nothing would ever arrive")


def parse_counts(option: str, text: str) -> tuple[int, ...]:
    """Read several counts: a list with commas, where `...` continues by doubling.

    Example:
        >>> parse_counts("--workers", "1,...,8,12"), parse_counts("--workers", "3,...,20")
        ((1, 2, 4, 8, 12), (3, 6, 12, 20))
    """
    items = [item.strip() for item in text.split(",")]
    if items[0] == "...":
        raise PlanError(f"{option} {text}: `...` has nothing to double; try 1,...,4096")
    if items[-1] == "...":
        raise PlanError(f"{option} {text}: `...` needs an end; try 1,...,4096")
    counts: list[int] = []
    for before, item in itertools.pairwise(["", *items]):
        if item != "...":
            value = parse_count(option, item)
            while before == "..." and 2 * counts[-1] < value:
                counts.append(2 * counts[-1])
            counts.append(value)
    return tuple(sorted(set(counts)))


def _parse(
    option: str, text: str, units: dict[str, float], example: str, zero: str | None = None
) -> float:
    """Read a number with a unit; `zero` says why it may not be 0, if it may not."""
    pattern = r"\s*(-?(?:\d+\.?\d*|\.\d+)(?:e-?\d+)?)\s*([A-Za-z/]*)\s*"
    number, unit = match.groups() if (match := re.fullmatch(pattern, text)) else ("nan", "")
    value, expected = float(number), f"expected such as {example}"
    if match is None:
        why = f"not a number with a unit, {expected}"
    elif unit not in units:
        why = f"unknown unit {unit!r}, expected one of {', '.join(filter(None, units))}"
    elif value < 0:
        why = f"below 0, {expected}"
    elif math.isinf(value):
        why = f"too large, {expected}"
    elif not value and zero:
        why = f"{zero}; {expected}"
    else:
        return value * units[unit]
    raise PlanError(f"{option} {text}: {why}")


# The part of a link's bytes that is payload. In an Ethernet frame of 1514 bytes, headers take 66;
# every two frames are acknowledged by a frame of 66 bytes.
PAYLOAD = 1448 / (1514 + 66 / 2)
# Bits of an entry, by short name of an exchange; codes add two floats for each column.
BITS = {"dense": 32, "fp16": 16, "8bit": 8, "4bit": 4, "2bit": 2, "1bit": 1}
_SCALES = 64
_CODED = ("8bit", "4bit", "2bit", "1bit")
_FLOAT = 4


@dataclass(frozen=True)
class Link:
    """A connection between hosts, or between workers of a host, full speed in both directions."""

    latency: float = 0.0  # seconds from sending a message to its arrival
    bandwidth: float = math.inf  # bytes per second


@dataclass(frozen=True)
class Software:
    """Costs that dtk, TensorFlow and the operating system add. `dtk bench` measures them.

    The defaults were measured with TensorFlow's collectives between two workers of one thread each
    on a machine with two cores; benchmarks/results/plan.md says how.
    """

    message: float = 0.77e-3  # seconds of an empty message, without the link
    byte: float = 3.0e-9  # seconds to copy a byte and to add it up
    step: float = 0.0  # seconds that a strategy adds to a step of plain Keras
    # seconds per parameter of encoding, decoding and residuals, by exchange
    coding: Mapping[str, float] = field(default_factory=lambda: {"fp16": 0.0, "1bit": 8.2e-9})
    # seconds of an entry of a product of factors, for each row of another worker
    product: float = 0.0
    hidden: float = 0.0  # 0 to 1: how much of the sending that it could hide a backward pass hides

    def coding_of(self, exchange: str) -> float:
        """Return the seconds that coding takes per parameter.

        Example:
            >>> Software(coding={"1bit": 5e-9}).coding_of("8bit")
            5e-09
            >>> Software().coding_of("dense")
            0.0
        """
        others = _CODED if exchange in _CODED else ()
        known = max((self.coding[e] for e in others if e in self.coding), default=0.0)
        return self.coding.get(exchange, known)


@dataclass(frozen=True)
class Factors:
    """Kernels with gradients that can go as rows of two matrices, see `dtk.exchange.factors`."""

    entries: float  # sum of m n over all kernels
    width: float  # sum of m + n over all kernels: numbers sent per row of the batch

    def most_rows(self, workers: float) -> float:
        """Return the number of rows, over all workers, from which on dtk sends no factors.

        Assumes that all workers have the same number of rows.

        Example:
            >>> kernel = Factors(entries=2048 * 2048, width=4096)
            >>> [round(kernel.most_rows(workers)) for workers in (2, 64)]
            [575, 339]
        """
        # A worker multiplies its own rows with or without factors.
        others = 1 - 1 / workers
        row = self.width * _FLOAT + 2 * self.entries * others / FLOPS_PER_BYTE
        return 2 * self.entries * _FLOAT / row

    def size(self, rows: int) -> float:
        """Return the bytes of so many rows.

        Example:
            >>> Factors(entries=2048 * 2048, width=4096).size(32)
            524288
        """
        return rows * self.width * _FLOAT


@dataclass(frozen=True)
class Training:
    """A training: a model and its batches."""

    # seconds of a step without sending, of the slowest worker, with as many workers per host as in
    # training
    step: float
    parameters: int  # trainable parameters
    rows: int = 32  # rows of that step
    # rows of all workers, if fixed for any number of workers; None if each worker has `rows`
    global_batch: int | None = None
    block_steps: int = 16  # steps between two exchanges of weights of block momentum
    column: int = 512  # entries of a column of a kernel, which has one column per output unit
    # bytes of whole gradients or of codes, by exchange, if measured
    sent: Mapping[str, float] = field(default_factory=dict)
    factors: Factors | None = None  # kernels with gradients that can go as factors, if known

    def rows_of(self, workers: int) -> int:
        """Return the rows in a step of the worker with the most.

        Example:
            >>> [Training(0.1, 9, 32, batch).rows_of(3) for batch in (None, 64)]
            [32, 22]
        """
        return self.rows if self.global_batch is None else math.ceil(self.global_batch / workers)

    def batch(self, workers: int) -> int:
        """Return the rows in a step of all workers."""
        return workers * self.rows if self.global_batch is None else self.global_batch

    def computing(self, workers: int) -> float:
        """Return the seconds of computing a step, assuming that they are proportional to its rows.

        Example:
            >>> Training(0.1, 1000, rows=32, global_batch=64).computing(4)
            0.05
        """
        return self.step * self.rows_of(workers) / self.rows

    def factored(self, workers: int) -> Factors | None:
        """Return the kernels with gradients that so many workers send as factors; else None.

        Example:
            >>> job = Training(0.1, 2048 * 2048, rows=32, factors=Factors(2048 * 2048, 4096))
            >>> [bool(job.factored(workers)) for workers in (1, 2, 11, 12)]
            [False, True, True, False]
        """
        if self.factors is None or workers == 1:
            return None
        # Assumes that every worker has the same number of rows.
        rows = workers * self.rows_of(workers)
        return self.factors if rows < self.factors.most_rows(workers) else None

    def size(self, exchange: str) -> float:
        """Return the bytes of one worker's gradients, as the exchange codes them.

        Example:
            >>> Training(0.1, 1024).size("dense"), Training(0.1, 1024).size("1bit")
            (4096.0, 144.0)
        """
        if exchange in self.sent:
            return self.sent[exchange]
        scales = _SCALES / self.column if exchange in _CODED else 0.0
        return self.parameters * (BITS[exchange] + scales) / 8


@dataclass(frozen=True)
class Cluster:
    """Hosts and links to train on."""

    network: Link  # between hosts
    host: Link = Link()  # between the workers of a host
    per_host: int = 1  # workers per host
    servers: int = 1  # parameter servers, each on its own host
    price: float = 0.0  # price of a host per hour
    software: Software = Software()  # costs besides the links

    def hosts(self, workers: int) -> int:
        """Return the hosts that so many workers fill.

        Example:
            >>> Cluster(Link(), per_host=4).hosts(9)
            3
        """
        return -(-workers // self.per_host)

    def seconds(self, traffic: Traffic, workers: int) -> float:
        """Return the seconds of traffic between so many workers.

        Traffic goes over the network, unless one host holds all workers.

        Example:
            >>> cluster = Cluster(Link(0.5, 100 / PAYLOAD), software=Software(0.25, 0.001))
            >>> cluster.seconds(Traffic(messages=2, bytes=200), workers=2)
            3.5
        """
        return sum(self.parts(traffic, workers))

    def parts(self, traffic: Traffic, workers: int) -> tuple[float, float]:
        """Return the seconds of a traffic's messages and the seconds of its bytes."""
        return self.over(self.host if self.hosts(workers) == 1 else self.network, traffic)

    def half_length(self, workers: int) -> float:
        """Return the bytes that take as long as a message, to a power of two.

        Example:
            >>> software = Software(message=0.5e-3, byte=4e-9)
            >>> Cluster(Link(), software=software).half_length(2)
            131072.0
        """
        return half_length(*self.parts(Traffic(1, 1), workers))

    def over(self, link: Link, traffic: Traffic) -> tuple[float, float]:
        """Return `parts` of traffic over one link: Hockney's model with the costs of software.

        A message takes the time of software and then of the link. Bytes are a stream: some are
        copied and added up while others travel, so the slower of software and link counts.
        """
        message = self.software.message + link.latency
        byte = max(self.software.byte, 1 / (link.bandwidth * PAYLOAD))
        return traffic.seconds(message, byte)

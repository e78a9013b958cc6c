"""What ends a job is pure: these tests start nothing."""

import json
import time

import pytest

from dtk.cluster.stall import RankReport
from dtk.launch.outcome import TIE, JobOutcome
from dtk.launch.plan import Process
from dtk.launch.task import Task

pytestmark = pytest.mark.command

PAIR = ("worker", "worker")
SERVED = ("chief", "worker", "worker", "ps", "evaluator")


class Ended:
    """Stands for a process that has ended."""

    pid = 0


def job(*roles):
    """A job's processes by name ("worker 1"), all running, and its rules."""
    ranks = {}
    for number, role in enumerate(roles):
        process = Process(f"rank {number}", role, number, "localhost", ("python",), {})
        ranks[f"{role} {roles[:number].count(role)}"] = Task(process, {}, False, Ended())
    return ranks, JobOutcome([rank.process for rank in ranks.values()], list(ranks.values()))


def end(rank, returncode, moment=10.0, how=""):
    if how == "begun":
        rank.status.take(RankReport(count=2, what="evaluation 2"), 1.0)
    rank.ended(returncode)
    rank.exited = moment
    rank.given_up |= how == "given up"


KILLED, GIVEN_UP = ("worker 0", -9, 1.0), ("worker 0", -9, 1.0, "given up")
# Ends in their order; whether the job is over, whose failure it is, and who is to be replaced.
HISTORIES = {
    "one has ended": (PAIR, [("worker 0", 0)], False, None, []),
    "one has failed": (PAIR, [("worker 0", 0), ("worker 1", -9)], True, "worker 1", []),
    "the chief has ended": (SERVED, [("chief 0", 0)], False, None, []),
    "and the evaluator": (SERVED, [("chief 0", 0), ("evaluator 0", 0)], True, None, []),
    **{
        f"{who} with {code}": (SERVED, [(who, code)], True, who, [])
        for who, code in [("chief 0", 3), ("chief 0", -9), ("ps 0", 3), ("ps 0", -9)]
    },
    "an evaluator, before it began": (SERVED, [("evaluator 0", 3)], True, "evaluator 0", []),
    **{
        f"an evaluator that has begun, with {code}: {what}": (
            SERVED,
            [("evaluator 0", code, 10.0, "begun"), *after],
            over,
            culprit,
            lost,
        )
        for code in (3, -9)
        for what, after, over, culprit, lost in [
            ("replaced", [], False, None, ["evaluator 0"]),
            ("done without", [("evaluator 0", code, 10.0, "given up")], False, None, []),
            # its numbers are missing
            ("missed", [("chief 0", 0, 20.0)], True, "evaluator 0", []),
            ("not the cause", [("chief 0", 5, 20.0)], True, "chief 0", []),
        ]
    },
    "a worker is killed": (SERVED, [KILLED], False, None, ["worker 0"]),
    "and one fails": (SERVED, [KILLED, ("worker 1", 3)], True, "worker 1", ["worker 0"]),
    "one is given up": (SERVED, [GIVEN_UP], False, None, []),
    "the last may be started again": (
        SERVED, [GIVEN_UP, ("worker 1", -9, 2.0)], False, None, ["worker 1"]
    ),
    "the last is given up": (
        SERVED, [GIVEN_UP, ("worker 1", -9, 2.0, "given up")], True, "worker 1", []
    ),
    "the other served to its end": (SERVED, [("worker 1", 0), GIVEN_UP], False, None, []),
    # It is noticed first, though it ended with the chief.
    **{
        f"after the chief: {who} with {code}": (
            SERVED,
            [(who, code, 5.0), ("chief 0", 0, 5.0 + TIE / 2), *last],
            bool(last),
            None,
            [],
        )
        for who in ("worker 0", "ps 0")
        for code in (3, -9)
        for last in ([], [("evaluator 0", 0, 20.0)])
    },
    "a server before the chief": (
        SERVED, [("ps 0", -9, 5.0), ("chief 0", 0, 9.0)], True, "ps 0", []
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("roles", "ends", "over", "culprit", "lost"), HISTORIES.values(), ids=HISTORIES
)
def test_what_ends_a_job_and_who_is_replaced(roles, ends, over, culprit, lost):
    ranks, outcome = job(*roles)
    for who, *how in ends:
        end(ranks[who], *how)
    assert outcome.over is over
    assert outcome.culprit() is ranks.get(culprit)
    assert outcome.lost() == [ranks[one] for one in lost]
    chief_ended = roles == SERVED and ranks["chief 0"].code is not None
    assert len(outcome.serving) == (3 if chief_ended else 0)


def test_a_chief_quick_to_say_that_a_server_is_gone_is_not_blamed():
    ranks, outcome = job(*SERVED)
    tell(ranks["chief 0"], ("UnavailableError", "Socket closed"), 4.9)
    end(ranks["ps 0"], -9, moment=5.0)
    end(ranks["chief 0"], 1, moment=5.5)
    assert outcome.culprit() is ranks["ps 0"]
    assert outcome.speaker(ranks["ps 0"]) is ranks["chief 0"]


def test_the_remote_shells_exit_code_tells_of_the_signal_over_there():
    process = Process("rank 1", "worker", 1, "node1", ("python",), {})
    far, near = Task(process, {}, True, Ended()), Task(process, {}, False, Ended())
    given = {code: [] for code in (137, 255, 3, -9)}
    for code, signals in given.items():
        for rank in (far, near):
            rank.ended(code)
            signals.append(rank.signal)
    # 255 is ssh's own failure; -9 is about the remote shell on this side.
    assert given == {137: [9, 0], 255: [0, 0], 3: [0, 0], -9: [0, 9]}


LOST = ("UnavailableError", "Socket closed")
WRONG = ("ValueError", "no such batch")


def tell(rank, error, moment):
    """Have a rank tell of the exception that ends it, or write what it was told by a library."""
    kind, message = error
    if not kind:
        rank.remember(message, stderr=True)
        return
    record = {"time": moment, "error": kind, "message": message, "file": "a.py", "line": 3}
    rank.hear(json.dumps({"failure": {**record, "lost_peer": error == LOST}}).encode())


def failed(rank, returncode, moment, error=None, later=0.0):
    if error is not None:
        tell(rank, error, moment)
    end(rank, returncode, moment + later)


@pytest.mark.parametrize(
    "first, then, culprit",
    [
        ((1, 10.0, LOST), (-9, 10.4), "worker 1"),  # the system reports a large process late
        ((1, 10.0, LOST), (-6, 10.4), "worker 1"),
        ((1, 10.0, WRONG), (-6, 10.1), "worker 0"),  # its peer aborts
        ((1, 10.0, LOST), (1, 10.4, WRONG), "worker 1"),
        ((1, 10.0, LOST), (1, 10.4, LOST), "worker 0"),
        ((1, 10.0, WRONG), (1, 10.1, LOST), "worker 0"),
        ((1, 10.4, WRONG), (1, 10.1, WRONG, 2.0), "worker 1"),  # which takes its time to end
        # of C++, which tells of no exception
        ((1, 10.0, ("", "Horovod has been shut down. This was")), (1, 10.4, WRONG), "worker 1"),
    ],
)
def test_who_lost_a_peer_is_not_who_failed_first(first, then, culprit):
    ranks, outcome = job(*PAIR)
    failed(ranks["worker 0"], *first)
    failed(ranks["worker 1"], *then)
    assert outcome.culprit() is ranks[culprit]


def test_the_clock_of_another_host_does_not_decide_who_failed_first():
    """Breaks as a wrong culprit: each host counts the seconds since its own start."""
    ranks, outcome = job(*PAIR)
    far, ahead = ranks["worker 1"], 1000.0
    far.remote, far._lag = True, float("inf")
    now = time.monotonic()
    record = {"time": now - 2.0 + ahead, "error": "ValueError", "message": "", "file": ""}
    told = {"failure": {**record, "line": 0, "lost_peer": False}, "sent": now + ahead}
    far.hear(json.dumps(told).encode())
    end(far, 1, now)
    failed(ranks["worker 0"], 1, now - 1.0, WRONG)
    assert outcome.culprit() is far


def test_a_rank_that_says_that_it_crashes_is_waited_for():
    """Writing where it crashed takes a busy machine longer than its peer takes to fail of it."""
    ranks, outcome = job(*PAIR)
    ranks["worker 1"].remember("Fatal Python error: Aborted", stderr=True)
    assert ranks["worker 1"].in_trouble and not ranks["worker 0"].in_trouble
    end(ranks["worker 0"], 1, time.monotonic() + 0.1)
    end(ranks["worker 1"], -6, time.monotonic() + 0.4)
    assert outcome.culprit() is ranks["worker 1"]
    assert ranks["worker 1"].last_words() == ["Fatal Python error: Aborted"]


def test_who_is_behind_a_lost_connection_is_not_a_victim_of_it():
    # ssh says that the connection was reset, as a rank does that has lost a peer.
    ranks, outcome = job(*PAIR)
    ranks["worker 1"].remote = True
    failed(ranks["worker 0"], 1, 10.0, LOST)
    failed(ranks["worker 1"], 255, 10.4, ("", "Connection reset by peer"))
    assert outcome.culprit() is ranks["worker 1"]

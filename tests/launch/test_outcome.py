"""What ends a job is pure: these tests start nothing."""

import time

import pytest

from dtk.cluster.stall import RankReport
from dtk.launch.outcome import TIE, JobOutcome
from dtk.launch.plan import Process
from dtk.launch.rank import Rank

SERVED = ["chief", "worker", "worker", "ps", "evaluator"]


class Ended:
    """Stands for a process that has ended."""

    pid = 0


def job(*roles):
    """A job's processes by name ("worker 1"), all running, and its rules."""
    ranks = {}
    for number, role in enumerate(roles):
        process = Process(f"rank {number}", role, number, "localhost", ("python",), {})
        ranks[f"{role} {roles[:number].count(role)}"] = Rank(process, {}, False, Ended())
    return ranks, JobOutcome([rank.process for rank in ranks.values()], list(ranks.values()))


def end(rank, returncode, moment=10.0):
    rank.ended(returncode)
    rank.exited = moment


def test_ranks_that_reduce_end_together_or_fail_together():
    ranks, outcome = job("worker", "worker")
    end(ranks["worker 0"], 0)
    assert not outcome.over
    end(ranks["worker 1"], -9)
    assert outcome.over
    assert outcome.culprit() is ranks["worker 1"]
    assert (outcome.lost(), outcome.serving) == ([], [])


def test_the_chief_and_the_evaluator_decide():
    ranks, outcome = job(*SERVED)
    end(ranks["chief 0"], 0)
    assert not outcome.over
    end(ranks["evaluator 0"], 0)
    assert outcome.over
    assert outcome.culprit() is None
    assert len(outcome.serving) == 3


@pytest.mark.parametrize(
    ("role", "returncode"),
    [("chief 0", 3), ("chief 0", -9), ("ps 0", 3), ("ps 0", -9), ("evaluator 0", 3)],
)
def test_who_may_not_fail(role, returncode):
    ranks, outcome = job(*SERVED)
    end(ranks[role], returncode)
    assert outcome.over
    assert outcome.culprit() is ranks[role]


EVALUATED = RankReport(count=2, what="evaluation 2")


@pytest.mark.parametrize("returncode", [3, -9])
def test_training_does_without_an_evaluator_that_has_begun(returncode):
    ranks, outcome = job(*SERVED)
    ranks["evaluator 0"].status.take(EVALUATED, 1.0)
    end(ranks["evaluator 0"], returncode)
    assert not outcome.over
    assert outcome.lost() == [ranks["evaluator 0"]]
    ranks["evaluator 0"].given_up = True
    assert (outcome.over, outcome.lost()) == (False, [])
    end(ranks["chief 0"], 0, 20.0)
    assert outcome.over
    assert outcome.culprit() is ranks["evaluator 0"], "its numbers are missing"
    end(ranks["chief 0"], 5, 20.0)
    assert outcome.culprit() is ranks["chief 0"]


def test_a_worker_may_be_killed_but_not_fail():
    ranks, outcome = job(*SERVED)
    end(ranks["worker 1"], -9)
    assert not outcome.over
    assert outcome.lost() == [ranks["worker 1"]]
    end(ranks["worker 0"], 3)
    assert outcome.culprit() is ranks["worker 0"]


def test_the_last_worker_that_is_given_up_ends_the_job():
    ranks, outcome = job(*SERVED)
    end(ranks["worker 0"], -9, moment=1.0)
    ranks["worker 0"].given_up = True
    assert not outcome.over
    assert outcome.workers_left() == [ranks["worker 1"]]
    end(ranks["worker 1"], -9, moment=2.0)
    assert not outcome.over  # it may still be started again
    ranks["worker 1"].given_up = True
    assert outcome.culprit() is ranks["worker 1"]


def test_a_worker_that_served_to_its_end_is_not_missed():
    ranks, outcome = job(*SERVED)
    end(ranks["worker 0"], 0)
    end(ranks["worker 1"], -9)
    ranks["worker 1"].given_up = True
    assert not outcome.over


@pytest.mark.parametrize("role", ["worker 0", "ps 0"])
@pytest.mark.parametrize("returncode", [3, -9])
def test_after_the_chief_no_servant_can_fail(role, returncode):
    ranks, outcome = job(*SERVED)
    end(ranks[role], returncode, moment=5.0)
    end(ranks["chief 0"], 0, moment=5.0 + TIE / 2)  # noticed first, though it ended with the chief
    assert not outcome.over
    assert outcome.lost() == []
    end(ranks["evaluator 0"], 0, moment=20.0)
    assert outcome.culprit() is None


def test_a_server_lost_before_the_chief_ended_well_is_a_failure():
    ranks, outcome = job(*SERVED)
    end(ranks["ps 0"], -9, moment=5.0)
    end(ranks["chief 0"], 0, moment=9.0)
    assert outcome.culprit() is ranks["ps 0"]


def test_a_chief_quick_to_say_that_a_server_is_gone_is_not_blamed():
    ranks, outcome = job(*SERVED)
    ranks["chief 0"].remember("Traceback (most recent call last):", stderr=True)
    ranks["chief 0"].trace_began = 4.9
    end(ranks["ps 0"], -9, moment=5.0)
    end(ranks["chief 0"], 1, moment=5.5)
    assert outcome.culprit() is ranks["ps 0"]
    assert outcome.speaker(ranks["ps 0"]) is ranks["chief 0"]


def test_the_remote_shells_exit_code_tells_of_the_signal_over_there():
    process = Process("rank 1", "worker", 1, "node1", ("python",), {})
    far, near = Rank(process, {}, True, Ended()), Rank(process, {}, False, Ended())
    given = {code: [] for code in (137, 255, 3, -9)}
    for code, signals in given.items():
        for rank in (far, near):
            rank.ended(code)
            signals.append(rank.signal)
    # 255 is ssh's own failure; -9 is about the remote shell on this side.
    assert given == {137: [9, 0], 255: [0, 0], 3: [0, 0], -9: [0, 9]}


LOST = ["Traceback (most recent call last):", "UnavailableError: Socket closed"]
SHUT = ["Traceback (most recent call last):", "UnknownError: Horovod has been shut down. This was"]


def failed(rank, returncode, moment, words=()):
    for line in words:
        rank.remember(line, stderr=True)
    if words:
        rank.trace_began = moment
    end(rank, returncode, moment)


@pytest.mark.parametrize(
    "first, then, culprit",
    [
        ((1, 10.0, LOST), (-9, 10.4), "worker 1"),  # the system reports a large process late
        ((1, 10.0, SHUT), (-6, 10.4), "worker 1"),
        ((1, 10.0, ["ValueError: no such batch"]), (-6, 10.1), "worker 0"),  # its peer aborts
        ((1, 10.0, LOST), (1, 10.4, ["Traceback", "ValueError: no such batch"]), "worker 1"),
        ((1, 10.0, LOST), (1, 10.4, LOST), "worker 0"),
        ((1, 10.0, ["ValueError: no such batch"]), (1, 10.1, LOST), "worker 0"),
    ],
)
def test_who_lost_a_peer_is_not_who_failed_first(first, then, culprit):
    ranks, outcome = job("worker", "worker")
    failed(ranks["worker 0"], *first)
    failed(ranks["worker 1"], *then)
    assert outcome.culprit() is ranks[culprit]


def test_a_rank_that_says_that_it_crashes_is_waited_for():
    """Writing where it crashed takes a busy machine longer than its peer takes to fail of it."""
    ranks, outcome = job("worker", "worker")
    ranks["worker 1"].remember("Fatal Python error: Aborted", stderr=True)
    assert ranks["worker 1"].in_trouble and not ranks["worker 0"].in_trouble
    end(ranks["worker 0"], 1, time.monotonic() + 0.1)
    end(ranks["worker 1"], -6, time.monotonic() + 0.4)
    assert outcome.culprit() is ranks["worker 1"]
    assert ranks["worker 1"].last_words() == ["Fatal Python error: Aborted"]


def test_who_is_behind_a_lost_connection_is_not_a_victim_of_it():
    # ssh says that the connection was reset, as a rank does that has lost a peer.
    ranks, outcome = job("worker", "worker")
    ranks["worker 1"].remote = True
    failed(ranks["worker 0"], 1, 10.0, [LOST[0], "UnknownError: Horovod has been shut down."])
    failed(ranks["worker 1"], 255, 10.4, ["Connection reset by peer"])
    assert outcome.culprit() is ranks["worker 1"]

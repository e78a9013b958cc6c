"""Ranks of real jobs that stop, sleep, lack data or are slow: the right one is named, or none.

`tools/faults.py` draws such trials at random; here is one of each kind.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))
import stall_faults  # noqa: E402

pytestmark = pytest.mark.command

WAYS = {way.name: way for way in stall_faults.every_way()}
COLLECTIVES, MPI, SERVERS = "dtk run, collectives", "dtk run, MPI", stall_faults.SERVERS
IDLE = r"rank {}, host \S+, did nothing for 5 s .*"
# The phase, the fault, its place and its victim; what is said, as a regular expression.
AT_START = [
    (way, "start", "sleep", place, "1", IDLE.format(1) + waits)
    for way in (COLLECTIVES, MPI)
    for place, waits in {
        **dict.fromkeys(("import", "imported", "constructor"), "rank 0 waits in the start of "),
        "build": r"rank 0 waits in collective \d+",
        "trace": "rank 0 waits in train step 1",
    }.items()
]
LATER = [
    (way, phase, "sleep", "callback", "1", IDLE.format(1) + rf"0 waits in ({step} step|collective)")
    for way, phase, step in (
        (COLLECTIVES, "fit", "train"),
        (MPI, "fit", "train"),
        ("dtk run, Horovod", "fit", "train"),
        (COLLECTIVES, "evaluate", "test"),
        (COLLECTIVES, "predict", "predict"),
    )
]
LATER += [
    (COLLECTIVES, "loop", "sleep", "step", "1", IDLE.format(1) + "0 waits in a function of Tens"),
    (COLLECTIVES, "loop", "slow", "step", "1", ""),
]
OVER = "rank 1, host localhost, has come to the end of its data before the others, and waits "
LATER += [
    (COLLECTIVES, "fit", "sleep", "data", "1", "rank 1, .* got no data for 5 s from Python in "),
    (COLLECTIVES, "save", "sleep", "state", "0", IDLE.format(0)),
    (COLLECTIVES, "save", "sleep", "thread", "0", "and of a thread that this one waits for:"),
    *[(COLLECTIVES, phase, "shorter", "", "1", OVER) for phase in ("fit", "evaluate", "predict")],
    (COLLECTIVES, "evaluate", "stop", "callback", "1", " It is stopped, as by SIGSTOP."),
    *[
        (COLLECTIVES, phase, "slow", place, "1", "")
        for phase, place in (("start", "import"), ("start", "trace"), ("fit", "callback"))
    ],
]
# Ranks that make no strategy, of a launcher that does not watch them.
ALONE = r"rank 1, host \S+, did nothing for 5 s before it made a strategy.*in the start of MPI"
UNWATCHED = [
    (f"mpirun, {of}", "start", fault, "import", "1", "" if fault == "slow" else ALONE)
    for of in ("MPI", "Horovod")
    for fault in ("sleep", "stop", "slow")
]
AGAIN = r"rank 2 \(worker 1\) has {} for 5 s.*, and was ended; starting it again"
SERVED = [
    (SERVERS, "fit", "stop", "callback", "worker 1", AGAIN.format("reported nothing")),
    (
        SERVERS,
        "start",
        "sleep",
        "import",
        "worker 1",
        "the stack of rank 2, the innermost call first:.*" + AGAIN.format("done nothing"),
    ),
    (SERVERS, "start", "sleep", "import", "ps 0", "ps 0, .* did nothing for 5 s before it made"),
    (SERVERS, "fit", "stop", "callback", "ps 0", "ps 0, .* reported nothing .* in service"),
    (
        SERVERS,
        "fit",
        "sleep",
        "callback",
        "chief 0",
        IDLE.format(0) + r"after work of the workers \d+.\nIts",
    ),
]


@pytest.mark.full_but(
    "dtk run, collectives-fit-sleep-callback-*",
    why="one of real training; ranks of plain Python are missing in the same ways",
)
@pytest.mark.timeout(400)  # on a machine that others use
@pytest.mark.parametrize(
    ("way", "phase", "fault", "place", "victim", "said"),
    [*AT_START, *LATER, *UNWATCHED, *SERVED],
    ids=lambda value: value if isinstance(value, str) and len(value) < 21 else "",
)
def test_a_rank_that_is_missing_is_named_and_a_slow_one_is_not(
    way, phase, fault, place, victim, said
):
    if way not in WAYS:
        pytest.skip(f"there is no {way} here")
    trial = stall_faults.Trial(phase, fault, place, victim, batch=3, background=False)
    faults, told = stall_faults.struck(WAYS[way], trial)
    assert faults == [], told
    assert re.search(said, told, re.DOTALL), told
    survives = fault == "slow" or victim.startswith("worker")
    assert told.count("the job has stopped moving, and was ended.") == (not survives), told

"""SIGTERM is a wish at first, and the end when nobody grants it."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time
import types

import pytest

from dtk.callbacks.checkpointing.termination import EXIT_CODE, Termination
from dtk.cluster import report_channel

pytestmark = pytest.mark.command

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(body, **how):
    program = f"""
        import os, signal, sys, threading, time, types
        from dtk.callbacks.checkpointing.termination import Termination
        alone = types.SimpleNamespace(size=1, rank=0, allgather_object=lambda value: [value])
        asked = Termination(alone, patience=0.5)
        {body}
    """
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=ROOT,
        capture_output=True,
        timeout=60,
        **how,
    )
    return done.returncode, time.monotonic() - began, done.stderr.decode()


def test_a_process_deaf_in_native_code_ends_all_the_same():
    # C sleep() does not return to Python, as a collective without a peer would not.
    code, seconds, error = run(
        "asked.install(); threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start();"
        "time.sleep(0.1); import ctypes; ctypes.CDLL(None).sleep(40); ctypes.CDLL(None).sleep(40)"
    )
    assert code == EXIT_CODE
    assert seconds < 20
    assert "rank 0: no step ended within 0.5 s of SIGTERM, so nothing was saved" in error


def test_a_granted_wish_leaves_time_to_save():
    code, _, error = run(
        "asked.install(); os.kill(os.getpid(), signal.SIGTERM); time.sleep(0.1);"
        "sys.exit(9) if not asked.wanted_after_step() else None; time.sleep(1); asked.remove();"
        "print('saved'); sys.exit(0)"
    )
    assert code == 0, error


def test_a_second_signal_changes_nothing_where_a_launcher_waits():
    """Breaks as a death by Slurm: it sends the signal to the ranks, and to the launcher too."""
    reports, end_of_rank = report_channel.pair()
    with reports, end_of_rank:
        code, _, _ = run(
            "os.environ.update(DTK_RUN='1', DTK_SAVE_GRACE='60'); asked.install();"
            "os.kill(os.getpid(), signal.SIGTERM); os.kill(os.getpid(), signal.SIGTERM);"
            "time.sleep(0.1); asked.wanted(); asked.remove(); sys.exit(5)",
            env={**os.environ, **report_channel.variables(end_of_rank)},
            pass_fds=[end_of_rank.fileno()],
            start_new_session=True,
        )
        end_of_rank.close()
        messages = iter(lambda: report_channel.receive(reports), b"")
        told = [json.loads(message)["saving"] for message in messages]
    assert code == 5
    assert told == ["ready", "begun", "over"]


def test_a_second_signal_ends_as_before():
    code, _, _ = run(
        "asked.install(); os.kill(os.getpid(), signal.SIGTERM); time.sleep(0.1);"
        "os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)"
    )
    assert code == -signal.SIGTERM


def test_a_signal_after_the_last_question_ends_as_before():
    """Breaks as a process that never ends: what came between the last step and fit's end was lost.

    An exception that leaves fit is told, as without the signal.
    """
    late = "asked.install(); asked.wanted(); os.kill(os.getpid(), signal.SIGTERM);"
    code, _, _ = run(f"{late} asked.remove(); time.sleep(30)")
    assert code == -signal.SIGTERM
    code, _, error = run(
        f"{late}\n"
        "        try: raise ValueError('the reason')\n"
        "        finally: asked.remove()"
    )
    assert code == 1 and "ValueError: the reason" in error


def test_installing_and_removing_leaves_nothing_behind():
    before = signal.getsignal(signal.SIGTERM)
    for _ in range(3):
        asked = Termination(types.SimpleNamespace(size=1))
        asked.install()
        assert signal.getsignal(signal.SIGTERM) != before
        asked.remove()
        asked.remove()
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize("pace, longest", [(0.0001, 512), (10.0, 1)])
def test_questions_become_rarer_step_by_step(monkeypatch, pace, longest):
    """A slow step after fast ones must not find everyone deaf for long."""
    clock, steps = [0.0], [0]
    monkeypatch.setattr("dtk.callbacks.checkpointing.termination.time.monotonic", lambda: clock[0])
    asked_at = []

    def gather(value):
        asked_at.append(steps[0])
        return [value, value]

    asked = Termination(types.SimpleNamespace(size=2, allgather_object=gather))
    for _ in range(1024):
        clock[0] += pace
        steps[0] += 1
        assert not asked.wanted_after_step()
    gaps = [b - a for a, b in zip(asked_at, asked_at[1:], strict=False)]
    assert asked_at[0] == 1
    assert max(gaps) <= longest
    assert all(b <= 2 * a for a, b in zip(gaps, gaps[1:], strict=False))


def test_validation_finds_a_pace_of_its_own(monkeypatch):
    """Breaks as a death by impatience: fast training left 512 slow steps of validation unasked."""
    clock, step = [0.0], [0]
    monkeypatch.setattr("dtk.callbacks.checkpointing.termination.time.monotonic", lambda: clock[0])
    asked_at = []

    def gather(value):
        asked_at.append(step[0])
        return [value, value]

    asked = Termination(types.SimpleNamespace(size=2, allgather_object=gather))
    for pace in (0.001, 5.0, 0.001):
        asked.find_pace()
        asked_at.clear()
        for step[0] in range(600):
            assert not asked.wanted_after_step()
            clock[0] += pace
        assert asked_at[:2] == [0, 1]
        assert len(asked_at) == (600 if pace > 1 else 10)

"""What dtk notes with each trial: who runs it, whether it ended, and what therefore counts.

A trial has one user attribute of dtk's, `dtk`: the process that runs it, the seed, and once its
objective has returned or raised, `ended`, with the reason of a failure. A process that is killed
cannot say that its trial is over; the next one that uses the study does, where it can see that the
other is gone.
"""

from __future__ import annotations

import datetime
import socket
import warnings
from collections.abc import Mapping

import optuna

from dtk.cluster import process_owner

ATTRIBUTE = "dtk"
_FINISHED = (
    optuna.trial.TrialState.COMPLETE,
    optuna.trial.TrialState.PRUNED,
    optuna.trial.TrialState.FAIL,
)
# Until a process has noted that it runs a trial which it has begun, storages of databases included.
_TO_NOTE = datetime.timedelta(minutes=1)
_RUNNING = optuna.trial.TrialState.RUNNING


def counts(trial: optuna.trial.FrozenTrial) -> bool:
    """Return whether a trial is one of `n_trials`.

    Those that ended with their job, such as by a signal, are not: they will be made up for. Nor is
    one too many, of groups that began their last at once.
    """
    if trial.state == _RUNNING:
        return True
    notes = trial.user_attrs.get(ATTRIBUTE, {})
    return trial.state in _FINISHED and ("ended" in notes or "owner" not in notes)


def counted(study: optuna.Study, before: int | None = None) -> int:
    """Count the trials of a study that have ended or are running."""
    trials = study.get_trials(deepcopy=False)
    return sum(counts(t) for t in trials if before is None or t.number < before)


def _place(process: object) -> str:
    """Say where a trial may be running, of which nothing is seen from here."""
    if not isinstance(process, Mapping):
        return "without dtk, in a process that is not known"
    name = process_owner.host_of(process)
    if name == socket.gethostname():
        return "on this host, but in another container or before it was last started"
    return f"on another host, {name}"


def fail_abandoned(study: optuna.Study) -> None:
    """Mark running trials failed whose process is gone, so that others are run in their place."""
    failed: list[int] = []
    unknown: dict[str, list[int]] = {}
    for trial in study.get_trials(deepcopy=False, states=(_RUNNING,)):
        process = trial.user_attrs.get(ATTRIBUTE, {}).get("owner")
        gone = process_owner.is_gone(process) if isinstance(process, Mapping) else None
        if gone:
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL, skip_if_finished=True)
            failed.append(trial.number)
        elif gone is None and (
            ATTRIBUTE in trial.user_attrs
            or trial.datetime_start is None
            # else another group may have just begun it, and not yet noted that it runs it
            or datetime.datetime.now() - trial.datetime_start >= _TO_NOTE
        ):
            unknown.setdefault(_place(process), []).append(trial.number)
    if failed:
        print(f"dtk: trials {failed} were left by a job that has ended; marked as failed")
    for place, numbers in unknown.items():
        warnings.warn(
            f"trials {numbers} of study {study.study_name!r} are running {place}, or were "
            "left there by a job that has ended; they count until study.tell(number, "
            "state=optuna.trial.TrialState.FAIL) says so. RDBStorage(url, heartbeat_interval=60) "
            "lets Optuna notice",
            stacklevel=3,
        )

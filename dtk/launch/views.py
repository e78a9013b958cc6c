"""The views of a job's events: a file of them, a timeline, a report, and `dtk top`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dtk.errors import ClusterError
from dtk.files import written
from dtk.launch import agent, monitor, report_page, timeline
from dtk.launch.events import Event, EventLog, Steps
from dtk.launch.job import Job

_RECENT = 5.0  # seconds of which `dtk top` tells the rates


class Files(NamedTuple):
    """Where the views go; None for those that nobody asked for."""

    events: str | None = None
    timeline: str | None = None
    report: str | None = None


class Watched:
    """A job that can be seen: its events, and what becomes of it.

    Attributes:
        code: The exit code, once it is known.
    """

    def __init__(self, files: Files, jobs: Sequence[Job]) -> None:
        self.events = EventLog()
        self.code: int | None = None
        self.wanted = "steps" if any(files) else "summary"
        self._jobs = jobs

    def snapshot(self, command: Sequence[str]) -> Event:
        """Return what `dtk top` shows of the job."""
        log, states = self.events, self._jobs[-1].states if self._jobs else {}
        waited = log.waited(log.attempt, _RECENT)
        rows = [
            {
                "rank": rank,
                "host": host,
                "state": state,
                **_rates(log.recent(log.attempt, rank, _RECENT)),
                "waiting": waited.get(rank) if isinstance(rank, int) else None,
            }
            for rank, (host, state) in states.items()
        ]
        return {
            "pid": os.getpid(),
            "command": list(command),
            "restarts": log.attempt,
            "ranks": rows,
            "slowest": log.slowest(),
        }


@contextlib.contextmanager
def watching(
    files: Files,
    jobs: Sequence[Job],
    settings: Mapping[str, object],
    command: Sequence[str],
    say: Callable[[str], None],
) -> Iterator[Watched]:
    """Return a context in which a job runs; the views are written whatever becomes of it.

    Raises:
        ClusterError: Before anything is started, if a file could not be written.
    """
    for option, file in files._asdict().items():
        _check(f"--{option}", file)
    watched = Watched(files, jobs)
    log = watched.events
    if files.events is not None:
        log.write_to(files.events, say)
    told: Event = {"command": list(command), "settings": dict(settings)}
    if any(files):
        told["versions"] = agent.versions()
    log.record("job start", None, **told)
    try:
        with monitor.serving(lambda: watched.snapshot(command)):
            yield watched
    except Exception as error:
        log.record("failure", text=str(error))
        raise
    finally:
        log.record("job end", code=watched.code)
        for file, make in ((files.timeline, timeline.trace), (files.report, report_page.page)):
            if file is not None:
                _write(file, make, log, say)
        log.close()


def _check(option: str, file: str | None) -> None:
    """Refuse, before anything is started, a file that could not be written."""
    if file is None:
        return
    path, why = Path(file), ""
    if path.is_dir():
        why = "it is a directory; name a file"
    elif path.exists() and not path.is_file() and option != "--events":
        why = "it is no file; name another one"
    elif not path.parent.is_dir():
        why = f"there is no directory {path.parent}; make it first"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        why = "this user may not write there; name another file"
    if why:
        raise ClusterError(f"{option} {file} cannot be written: {why}")


def _write(
    file: str, make: Callable[[EventLog], str], log: EventLog, say: Callable[[str], None]
) -> None:
    try:
        with written(Path(file)) as draft:
            draft.write_text(make(log), encoding="utf-8")
    except OSError as error:
        say(f"{file} could not be written: {error.strerror}")


def _rates(recent: Steps | None) -> Event:
    if recent is None or recent.until <= recent.since:
        return {}
    elapsed = recent.until - recent.since
    return {
        "step": recent.last,
        "epoch": recent.epoch,
        "samples": None if recent.samples is None else recent.samples / elapsed,
        "bytes": recent.bytes / elapsed,
        "memory": recent.memory,
        "loss": recent.loss,
    }

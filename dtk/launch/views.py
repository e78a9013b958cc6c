"""The views of a job's events: a file of them, a timeline, a report, and `dtk top`."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from dtk.errors import check_writable
from dtk.files import written
from dtk.launch import agent, monitor, report_page, timeline
from dtk.launch.job_run import JobRun

# Files, and what opens them.
_VIEWS = {"events": "", "timeline": ", for https://ui.perfetto.dev", "report": ", for a browser"}
_RECENT = 5.0  # seconds of which `dtk top` tells the rates


@contextlib.contextmanager
def reporting(
    settings: Mapping[str, object],  # "events", "timeline" and "report" are files
    running: JobRun,
    say: Callable[[str], None],
) -> Iterator[None]:
    """Return a context in which a job runs; its views are written whatever becomes of it."""
    files = {name: str(settings[name]) for name in _VIEWS if settings[name]}
    check_writable({f"--{name}": file for name, file in files.items()})
    log, command = running.log, shlex.join(running.spec.command[1:])
    if "events" in files:
        log.write_to(files["events"], say)
    versions = agent.versions() if files else {}
    log.record("job start", command=command, settings={**settings}, versions=versions)
    try:
        with monitor.serving(lambda: _snapshot(running, command)):
            yield
    except Exception as error:
        log.record("failure", text=str(error))
        raise
    finally:
        if log.kept[-1].kind != "job end":
            log.record("job end", code=None)
        log.close()
        makers = {"timeline": timeline.trace, "report": report_page.page}
        views = [
            f"{name} {Path(file).resolve()}{_VIEWS[name]}"
            for name, file in files.items()
            if name == "events" or _write(Path(file), functools.partial(makers[name], log), say)
        ]
        if views:
            say(f"written: {'; '.join(views)}")


def _write(file: Path, make: Callable[[], str], say: Callable[[str], None]) -> bool:
    try:
        with written(file) as draft:
            draft.write_text(make(), encoding="utf-8")
        return True
    except OSError as error:
        say(f"{file} could not be written: {error.strerror}")
    except Exception:  # noqa: BLE001 - the job's own end and exit code count more than its picture
        say(f"{file} could not be drawn, by a fault of dtk:\n{traceback.format_exc()}")
    return False


def _snapshot(running: JobRun, command: str) -> monitor.JobSnapshot:
    """Return what `dtk top` shows: the columns of a table, as text."""
    log, jobs = running.log, running.jobs
    waited, slowest = log.waited(log.attempt, _RECENT), log.slowest(log.attempt)
    rows = []
    for rank, (host, state) in jobs[-1].states.items() if jobs else ():
        row = dict.fromkeys(("epoch", "step", "samples/s", "waiting", "memory", "sent/s"), "-")
        if steps := log.recent(rank, _RECENT):
            row |= {"epoch": f"{steps.epoch}", "step": f"{steps.last}"}
            row["memory"] = f"{steps.memory / 1e6:,.0f} MB"
            row["sent/s"] = f"{steps.bytes / steps.elapsed / 1e3:,.1f} kB"
            if steps.samples is not None:
                row["samples/s"] = f"{steps.samples / steps.elapsed:,.0f}"
            if rank in waited:
                row["waiting"] = f"{waited[rank]:.0%}"
        rows.append({"rank": f"{rank}", "host": host, **row, "state": state})
    told = f"job {os.getpid()}: {command}"
    told += f" (restarts: {log.attempt})" if log.attempt else ""
    return {"pid": os.getpid(), "title": told, "rows": rows, "slowest": slowest}

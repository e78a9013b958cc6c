"""The launcher's report of the process that failed first."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from dtk.cluster import rank_files
from dtk.cluster import stall as stalls
from dtk.cluster.stall import Stall
from dtk.launch.rank import Rank
from dtk.launch.watch import SETTLE

# What to do about a rank that somebody, or the system, has killed.
_NEXT = (
    "dtk: a script with dtk.callbacks.Checkpoint(directory, resume=True) goes on from its last "
    "checkpoint when it is started again; `dtk run --max-restarts 3 ...` does so by itself."
)


def failure_report(
    rank: Rank, speaker: Rank, count: int, left_out: int = 0, restarts: bool = True
) -> str:
    """Return the first failing process's last output, so that it is what stands last."""
    text = f"dtk: {rank.process.name}, host {rank.process.host} failed first, {rank.how}"
    text += "." if count == 1 else "; the others were ended."
    if rank.file is not None:
        text += f" All it wrote is in {rank.file.name}."
    if left_out:
        where = "beside that" if rank.file is not None else "kept by --output-dir"
        text += f" What others said of it later is left out here: {left_out} lines, {where}."
    words = rank.last_words()
    if speaker is not rank:
        lines = [*_words_about(rank, speaker), text]
    else:
        text += " Its last output:" if words else " It wrote nothing."
        lines = [text, *words]
        if count > 1 and (told := rank_files.advice(words, rank.process.rank)):
            lines.append(told)
    if rank.signal == signal.SIGKILL and not restarts:
        lines.append(_NEXT)
    return "\n".join(["", *lines, ""])


def leaver_report(left: Rank) -> str:
    """Return the line about a rank that left its script while others needed it."""
    last = left.status.last
    where = f" after {last['what']}" if last else ""
    return (
        f"dtk: {left.process.name}, host {left.process.host}, left its script{where}, with exit "
        f"code 0, and the others failed because of it: {stalls.ADVICE}\n"
    )


def stall_report(stall: Stall, ranks: Sequence[Rank], ended: bool = True) -> str:
    """Return what was seen of a job that has stopped moving: who is missing, where, who waits."""
    names = [rank.process.name for rank in ranks]
    hosts = [rank.process.host for rank in ranks]
    statuses = [rank.status for rank in ranks]
    if ended:
        return stalls.describe(stall, names, hosts, statuses)
    lines = stalls.describe_missing(stall, names, hosts, statuses)
    return "\n".join([f"dtk: {lines[0]}", *lines[1:], ""])


def _words_about(lost: Rank, chief: Rank) -> list[str]:
    """Return what the chief said of a lost parameter server, and the server's last lines.

    A server that was killed could not say why, but its last lines may help.
    """
    verdict = chief.trace_since(lost.exited - SETTLE)
    own = [] if verdict and lost.signal else lost.last_words()
    lines: list[str] = []
    for rank, words in ((chief, verdict), (lost, own)):
        if words:
            lines += [f"dtk: the last output of {rank.process.name}:", *words]
    return lines

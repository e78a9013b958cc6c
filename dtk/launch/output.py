"""Output of a job's processes: passed on line by line, and kept in files."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Literal, TextIO, TypeVarTuple

import click

from dtk.cluster import progress, report_channel
from dtk.cluster.standing import Standing
from dtk.errors import ClusterError
from dtk.launch.plan import Process
from dtk.launch.rank import Rank
from dtk.quiet import is_noise

# What TensorFlow says to the chief of tasks that are gone, four lines for each function it had sent
# them: the loss itself is said in one line.
_TASK_GONE = re.compile(
    r"[EW]\d{4} .*context\.cc:\d+\] Failed to (remove|register) function remotely due to |"
    r"Additional GRPC error information from remote target /job:|"
    r":UNKNOWN:Error received from peer |"
    r"This could happen if the remote target has been disconnected from the client\.$"
)
_ENDS = 5.0  # seconds that a process has to end after it has closed everything
_COLORS = ("cyan", "yellow", "green", "magenta", "blue", "bright_red")


Given = TypeVarTuple("Given")


class JobOutput:
    """Passes on what processes write, with a prefix each, and what the launcher says itself.

    Args:
        processes: The plan; gives the prefixes their width and color.
        directory: Gets one file per process with its whole output, or None.
        append: Whether files that are there are continued.
        stdout: Where standard output goes; `sys.stdout` when None.
        stderr: Where standard error goes; `sys.stderr` when None.
        on_closed: Called when the reader of the output is gone.
        is_suppressed: Whether a process's standard error goes to its file only: another has failed.
        on_saving: Called when a process says what it would do, or does, about a checkpoint.

    Attributes:
        suppressed: How many lines did.
    """

    def __init__(
        self,
        processes: Sequence[Process],
        directory: Path | None,
        append: bool,
        stdout: TextIO | None,
        stderr: TextIO | None,
        on_closed: Callable[[], None],
        is_suppressed: Callable[[Rank], bool],
        on_saving: Callable[[Rank], None],
    ) -> None:
        self.suppressed = 0
        self._is_suppressed = is_suppressed
        self._on_saving = on_saving
        self._processes = processes
        self._directory = directory
        self._mode: Literal["a", "w"] = "a" if append else "w"
        self._streams = (stdout, stderr)
        self._on_closed = on_closed
        self._write_lock = threading.Lock()

    def make_directory(self) -> None:
        """Make the directory for the files, if one was given.

        Raises:
            ClusterError: It cannot be made.
        """
        if self._directory is None:
            return
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ClusterError(
                f"output directory {self._directory} cannot be made: {error.strerror}"
            ) from None

    def open_file(self, rank: Rank) -> None:
        """Open the file of one process, if a directory was given.

        Args:
            rank: Gets the file.
        """
        if self._directory is not None:
            name = rank.process.name.replace(" ", "-") + ".log"
            rank.file = open(self._directory / name, self._mode, encoding="utf-8")  # noqa: SIM115

    def relay(self, rank: Rank, reports: socket.socket | None) -> None:
        """Start the threads that read what a process writes and reports.

        Args:
            rank: What runs; gets the threads, and remembers its last lines.
            reports: Where its reports come; None where they are in its standard error.
        """
        if reports is not None:
            self._start_reader(rank, self._listen, rank, rank.popen, reports)
        streams = [
            given or default
            for given, default in zip(self._streams, (sys.stdout, sys.stderr), strict=True)
        ]
        popen = rank.popen
        for pipe, stream in ((popen.stdout, streams[0]), (popen.stderr, streams[1])):
            assert pipe is not None
            self._start_reader(rank, self._read, rank, pipe, stream, pipe is popen.stderr)

    def write_error(self, text: str) -> None:
        """Write to the standard error.

        Args:
            text: Whole lines.
        """
        self._write(self._streams[1] or sys.stderr, text)

    def say(self, text: str) -> None:
        """Write a line of the launcher's own to the standard error.

        Args:
            text: The line, without its end.
        """
        self.write_error(f"dtk run: {text}\n")

    def _read(self, rank: Rank, pipe: IO[bytes], stream: TextIO, stderr: bool) -> None:
        line, torn = b"", b""
        with pipe:
            while read := pipe.read1(1 << 16):  # type: ignore[attr-defined]
                if stderr and rank.remote:
                    read, records, torn = report_channel.cut(torn + read)
                    for record in records:
                        self._hear(rank, record)
                *lines, line = (line + read).split(b"\n")
                for one in lines:
                    self._take(rank, one, stream, stderr)
        if line + torn:
            self._take(rank, line + torn, stream, stderr)

    def _take(self, rank: Rank, raw: bytes, stream: TextIO, stderr: bool) -> None:
        # A progress bar rewrites its line with carriage returns: what counts is what it shows last.
        line = raw.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
        if rank.file is not None:
            rank.file.write(line + "\n")
            rank.file.flush()
        if stderr and rank.dump is not None:
            rank.dump.append(line)
            return
        if stderr and is_noise(line, rank.process.env.get("TF_CPP_MIN_LOG_LEVEL")):
            return
        if stderr and rank.process.role == "chief" and _TASK_GONE.match(line):
            return
        rank.remember(line, stderr)
        if stderr and self._is_suppressed(rank):
            self.suppressed += 1
            return
        self._write(stream, f"{self._prefix(rank, stream)}{line}\n")

    def _start_reader(self, rank: Rank, read: Callable[[*Given], None], *given: *Given) -> None:
        reader = threading.Thread(target=read, args=given, daemon=True)
        rank.readers.append(reader)
        reader.start()

    def _listen(self, rank: Rank, popen: subprocess.Popen[bytes], reports: socket.socket) -> None:
        with reports:
            while message := report_channel.receive(reports):
                self._hear(rank, message)
        with contextlib.suppress(subprocess.TimeoutExpired):
            popen.wait(_ENDS)
            return
        if rank.popen is popen and progress.VARIABLE in rank.env:
            rank.standing = Standing()
            self.say(
                f"{rank.process.name} has closed the descriptor of its reports "
                f"({report_channel.VARIABLE}): a job that is stuck is not noticed any more"
            )

    def _hear(self, rank: Rank, message: bytes) -> None:
        before = rank.saving
        rank.hear(message)
        if rank.saving != before:
            self._on_saving(rank)

    def _prefix(self, rank: Rank, stream: TextIO) -> str:
        width = max(len(process.label) for process in self._processes)
        text = f"[{rank.process.label:>{width}}] "
        if stream.isatty() and not os.environ.get("NO_COLOR"):
            index = self._processes.index(rank.process)
            return click.style(text, fg=_COLORS[index % len(_COLORS)])
        return text

    def _write(self, stream: TextIO, text: str) -> None:
        with self._write_lock:
            try:
                stream.write(text)
                stream.flush()
            except (OSError, ValueError):
                # The reader is gone (`dtk run ... | head`): end the job as the shell would.
                self._on_closed()

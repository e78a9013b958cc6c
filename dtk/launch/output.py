"""Output of a job's processes: passed on line by line, and kept in files."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Literal, TextIO

import click

from dtk.cluster import progress, saving, usage
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
_COLORS = ("cyan", "yellow", "green", "magenta", "blue", "bright_red")


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

    def relay(self, rank: Rank) -> None:
        """Start the threads that read what a process writes.

        Args:
            rank: What runs; gets the threads, and remembers its last lines.
        """
        streams = [
            given or default
            for given, default in zip(self._streams, (sys.stdout, sys.stderr), strict=True)
        ]
        popen = rank.popen
        for pipe, stream in ((popen.stdout, streams[0]), (popen.stderr, streams[1])):
            assert pipe is not None
            reader = threading.Thread(
                target=self._read, args=(rank, pipe, stream, pipe is popen.stderr), daemon=True
            )
            rank.readers.append(reader)
            reader.start()

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
        prefix = self._prefix(rank, stream)
        level = rank.process.env.get("TF_CPP_MIN_LOG_LEVEL")
        with pipe:
            while raw := pipe.readline(1 << 16):
                # A progress bar rewrites its line with carriage returns: what counts is what it
                # shows last.
                line = raw.decode("utf-8", "replace").rstrip("\r\n").rpartition("\r")[2]
                if stderr and line.startswith(progress.MARK):
                    rank.hear(line.removeprefix(progress.MARK))
                    continue
                if stderr and line.startswith(saving.MARK):
                    rank.saving = line.removeprefix(saving.MARK)
                    self._on_saving(rank)
                    continue
                if stderr and line.startswith(usage.MARK):
                    rank.observe(line.removeprefix(usage.MARK))
                    continue
                if rank.file is not None:
                    rank.file.write(line + "\n")
                    rank.file.flush()
                if stderr and rank.dump is not None:
                    rank.dump.append(line)
                    continue
                if stderr and is_noise(line, level):
                    continue
                if stderr and rank.process.role == "chief" and _TASK_GONE.match(line):
                    continue
                rank.remember(line, stderr)
                if stderr and self._is_suppressed(rank):
                    self.suppressed += 1
                    continue
                self._write(stream, f"{prefix}{line}\n")

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

"""Output of a job's processes: passed on line by line, and kept in files."""

from __future__ import annotations

import bisect
import collections
import contextlib
import functools
import os
import re
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TextIO

import click

from dtk.cluster import report_channel
from dtk.errors import ClusterError
from dtk.launch.outcome import JobOutcome
from dtk.launch.reader import Reader
from dtk.launch.screen import Screen, Sink, WrittenText
from dtk.launch.task import JobState, Task
from dtk.quiet import is_noise

# TensorFlow's lines about lost tasks on the chief, four for each function it had sent them; dtk
# reports the loss in one.
_TASK_GONE = re.compile(
    r"[EW]\d{4} .*context\.cc:\d+\] Failed to (remove|register) function remotely due to |"
    r"Additional GRPC error information from remote target /job:|"
    r":UNKNOWN:Error received from peer |"
    r"This could happen if the remote target has been disconnected from the client\.$"
)
# srun's, where nothing is bound to cores anyway.
_NOT_BOUND = "srun: cluster configuration lacks support for cpu binding"
_COLORS = ("cyan", "yellow", "green", "magenta", "blue", "bright_red")
_FRAME = 0.1  # seconds between two pictures of a progress bar
_LINE = 5.0  # seconds between two lines of one, where it cannot be drawn anew
_HOLD = 0.5  # seconds that a line waits for those of others
_EQUAL = 10.0  # seconds in which an equal line of another process is the same event
_MOST = 10_000  # lines that are known afterwards
_MOST_READS = 20  # of 64 KiB, by which a pipe is empty
_WAITS = 1.0  # seconds without a reader, after which output counts as unread


class _Stream:
    """One stream of one process, while it is read."""

    def __init__(self, rank: Task, pipe: IO[bytes], sink: Sink, prefix: str, drawn: bool) -> None:
        self.rank, self.pipe, self.sink, self.prefix = rank, pipe, sink, prefix
        self.stderr = pipe is rank.popen.stderr
        self.drawn = drawn  # whether its unfinished row is drawn
        self.text = WrittenText()
        self.shown = ""  # of its row
        self.torn = b""  # the begin of an agent's record
        self._noted, self._noted_at = "", time.monotonic()

    @property
    def row(self) -> str:
        """The unfinished row that is drawn."""
        is_bar = self.text.is_redrawn or not self.stderr
        return self.text.row if is_bar and self.rank.dump is None else ""

    def due(self, now: float) -> str:
        """Return the row of a bar, every few seconds, for where it cannot be drawn."""
        row = self.text.row if self.text.is_redrawn else ""
        if not row:
            self._noted_at = now
        if row == self._noted or now - self._noted_at < _LINE:
            return ""
        self._noted, self._noted_at = row, now
        return row


class EqualLines:
    """Holds lines for a moment, to show those that several processes write equally once.

    A line is shown as often as the process wrote it that wrote it most often. Those that come too
    late to be named with it are only counted.
    """

    def __init__(self) -> None:
        self.late = 0
        self._held: collections.deque[_Line] = collections.deque()
        self._shown: collections.deque[_Line] = collections.deque()
        self._equal: dict[str, list[_Line]] = {}
        self._lock = threading.Lock()

    def add(self, writer: str, text: str, now: float) -> None:
        with self._lock:
            equal = self._equal.setdefault(text, [])
            # Those that it wrote, too, come first.
            at = bisect.bisect(equal, False, key=lambda one: writer not in one.writers)
            if at == len(equal):
                equal.append(_Line(text, now))
                self._held.append(equal[at])
            line = equal[at]
            self.late += line.is_shown
            line.writers.append(writer)

    def due(self, now: float | None = None) -> list[tuple[str, list[str]]]:
        """Return the lines that were held for long enough, and who wrote them."""
        lines = []
        with self._lock:
            while self._held and (now is None or now - self._held[0].when >= _HOLD):
                line = self._held.popleft()
                line.is_shown = True
                self._shown.append(line)
                lines.append((line.text, line.writers))
            while self._shown and (
                len(self._shown) > _MOST
                or (now is not None and now - self._shown[0].when >= _EQUAL)
            ):
                line = self._shown.popleft()
                self._equal[line.text].remove(line)
                if not self._equal[line.text]:
                    del self._equal[line.text]
        return lines


class _Line:
    def __init__(self, text: str, when: float) -> None:
        self.text, self.when = text, when
        self.writers: list[str] = []
        self.is_shown = False


class JobOutput:
    """Passes on what processes write, with a prefix each, and what the launcher says itself."""

    def __init__(
        self,
        state: JobState,
        outcome: JobOutcome,
        append: bool,
        stdout: TextIO | None,
        stderr: TextIO | None,
    ) -> None:
        self.suppressed = 0
        self._state, self._outcome = state, outcome
        directory = state.spec.output_dir
        self._directory, self._append = None if directory is None else Path(directory), append
        self._width = max((len(f"{one.rank_name}") for one in state.spec.processes), default=0)
        out, err = stdout or sys.stdout, stderr or sys.stderr
        self._sinks = [self._sink(out, "standard output"), self._sink(err, "standard error")]
        if out is err:
            self._sinks[1] = self._sinks[0]
        self._screen = Screen(self._sinks)
        self._equal = EqualLines()
        # Lines are written in the order in which they were held, and before what is said next.
        self._writing = threading.RLock()
        self._sources: list[_Stream] = []
        self._readers: list[Reader] = []

    def _sink(self, stream: TextIO | None, name: str, is_file: bool = False) -> Sink:
        def failed(why: str) -> None:
            what = f"{name} takes nothing: {why}. The job goes on without"
            if self._directory is not None and not is_file:
                what += f"; all that ranks write is in {self._directory}"
            self._beside(sink, what)

        def gone(why: str) -> None:
            if not self._state.broken_pipe:
                self._state.stop(broken_pipe=True)
                end = "the job is ended, with exit code 141"
                self._beside(sink, f"nobody reads {name} any more, as after `| head`: {end}")

        sink = Sink(stream, name, failed, None if is_file else gone, lambda: self._state.stopping)
        return sink

    def _beside(self, sink: Sink, text: str) -> None:
        """Say something about a sink, where that can be read."""
        other = self._sinks[0] if sink is self._sinks[1] else self._sinks[1]
        if other is not sink:
            other.write(f"dtk run: {text}\n")

    @property
    def waits(self) -> bool:
        """Whether nobody reads, so that processes may wait for the launcher."""
        return any(sink.waited > _WAITS for sink in self._sinks)

    def open(self) -> None:
        """Make the directory for the files, if one was given, and begin to read."""
        # Two: whoever does not take the output may take what is wrong.
        self._readers = [Reader(f"dtk {name}", self._state.stop) for name in ("output", "errors")]
        for reader in self._readers:
            reader.call_later(_FRAME, functools.partial(self._show, reader))
        if self._directory is None:
            return
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ClusterError(
                f"output directory {self._directory} cannot be made: {error.strerror}"
            ) from None

    def open_file(self, rank: Task) -> None:
        """Open the file of one process, if a directory was given."""
        if self._directory is None:
            return
        path = self._directory / (rank.process.name.replace(" ", "-") + ".log")
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if self._append else os.O_TRUNC)
        try:
            file = os.fdopen(os.open(path, flags, 0o666), "a", encoding="utf-8")
            rank.file = self._sink(file, str(path), is_file=True)
        except OSError as error:
            raise ClusterError(f"{path} cannot be written: {error.strerror}") from None

    def relay(self, rank: Task) -> None:
        """Begin to read what a process writes."""
        processes = self._state.spec.processes
        number = processes.index(rank.process)
        label = f"[{rank.process.rank_name:>{self._width}}] "
        pipes = (rank.popen.stdout, rank.popen.stderr)
        for pipe, sink, reader in zip(pipes, self._sinks, self._readers, strict=True):
            assert pipe is not None
            is_plain = not sink.is_terminal or os.environ.get("NO_COLOR")
            prefix = label if is_plain else click.style(label, fg=_COLORS[number % len(_COLORS)])
            # Bars of others would hide the first's.
            source = _Stream(rank, pipe, sink, prefix, not number and self._screen.draws(sink))
            self._sources.append(source)
            rank.open.append(reader.add(pipe.fileno(), functools.partial(self._read, source)))

    def write_error(self, text: str) -> None:
        """Write to the standard error."""
        self._write_equal()
        self._screen.write(self._sinks[1], text)

    def say(self, text: str) -> None:
        """Write a line of the launcher's own to the standard error."""
        self.write_error(f"dtk run: {text}\n")

    def close(self) -> None:
        """Write all that processes wrote which have ended, however slowly it is taken."""
        for reader in self._readers:
            reader.close()
        for source in list(self._sources):
            # While a slow reader was waited for, a pipe has kept what it holds. Whoever has it
            # open still may have left the job, and write for ever.
            os.set_blocking(source.pipe.fileno(), False)
            with contextlib.suppress(BlockingIOError):
                for _ in range(_MOST_READS):
                    if self._state.error or not self._read(source):
                        break
            if source in self._sources:
                self._end(source)
        self._write_equal()
        if self._equal.late:
            what = "lines of standard error were not shown again, as another rank had written them"
            self.say(f"{self._equal.late} {what}")

    # --- reading a process ---

    def _read(self, source: _Stream) -> bool:
        rank, read = source.rank, os.read(source.pipe.fileno(), 1 << 16)
        if not read:
            self._end(source)
            return False
        if source.stderr and rank.remote:
            read, records, source.torn = report_channel.split_records(source.torn + read)
            for record in records:
                rank.hear(record)
        self._take(source, source.text.feed(read))
        return True

    def _end(self, source: _Stream) -> None:
        source.pipe.close()
        self._take(source, source.text.feed(b"", final=True))
        self._sources.remove(source)

    def _take(self, source: _Stream, lines: Sequence[str]) -> None:
        rank, stderr = source.rank, source.stderr
        if lines:
            self._draw(source)  # else its row would stand below what it has become
        for line in lines:
            if rank.file is not None:
                rank.file.write(click.unstyle(line) + "\n")
            if stderr and rank.dump is not None:
                rank.dump.append(line)
            elif not stderr or not (
                is_noise(line, rank.process.env.get("TF_CPP_MIN_LOG_LEVEL"))
                or line == _NOT_BOUND
                or (rank.process.role == "chief" and _TASK_GONE.match(line))
            ):
                rank.remember(line, stderr)
                if stderr and self._outcome.failed_before(rank):
                    self.suppressed += 1
                elif stderr and len(self._state.spec.processes) > 1:
                    self._equal.add(source.prefix, line, time.monotonic())
                else:
                    self._screen.write(source.sink, f"{source.prefix}{line}\n")

    # --- what is not over ---

    def _show(self, reader: Reader) -> None:
        """Show what is being written to the streams of a reader, and what was held."""
        now, first = time.monotonic(), self._state.spec.processes[0]
        stderr = reader is self._readers[1]
        for source in [one for one in self._sources if one.stderr == stderr]:
            self._draw(source)
            if row := source.due(now):
                if source.rank.file is not None:
                    source.rank.file.write(click.unstyle(row) + "\n")
                if source.rank.process is first and not source.drawn:
                    self._screen.write(source.sink, f"{source.prefix}{row}\n")
        if stderr:
            self._write_equal(now)
        reader.call_later(_FRAME, functools.partial(self._show, reader))

    def _draw(self, source: _Stream) -> None:
        """Have the row that the first process is writing drawn, where it can be."""
        row = source.row
        if source.drawn and row != source.shown:
            self._screen.show(f"{source.prefix}{row}" if row else "")
            source.shown = row

    def _write_equal(self, now: float | None = None) -> None:
        """Write the lines of standard error that were held, of several processes once."""
        with self._writing:
            for line, writers in self._equal.due(now):
                prefix = writers[0] if len(writers) == 1 else f"[on {len(writers)} ranks] "
                self._screen.write(self._sinks[1], f"{prefix}{line}\n")

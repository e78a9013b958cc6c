"""Seeing a job to its end.

    start ──> ranks run ──┬── the training has ended with 0 ──> the rest is ended ──> code 0
                 ^   │    ├── one fails ──> settle ──> the others are ended ──> its words and code
                 └───┘    └── stop() ─────────────────> all are ended
          a lost worker that
          servers can spare

What counts as which is said in `ending`. "Ended" is SIGTERM, then, `grace` seconds later, SIGKILL
for whatever still carries the job's mark: a rank may be stuck inside TensorFlow, where it cannot
act on SIGTERM. A thread watches, so a failure is acted upon even while nobody waits; it alone
starts and ends processes once the job runs. If this process itself is killed, a guard process does
the ending.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TextIO

import click

from dtk.errors import ClusterError
from dtk.launch import agent, ending, local, rendezvous, ssh
from dtk.launch.noise import is_noise
from dtk.launch.plan import Process
from dtk.launch.rank import Rank, signal_name

_COLORS = ("cyan", "yellow", "green", "magenta", "blue", "bright_red")
_SETTLE = 1.0  # seconds a rank that already printed a traceback gets to exit by itself
# Seconds the chief gets to say what the loss of a parameter server means. On one machine TensorFlow
# 2.21 raises within seconds; over a network the loss takes longer to show.
_FAREWELL = 30.0


class Job:
    """The processes of a plan, started and supervised.

    Args:
        processes: What `plan` returned.
        output_dir: Directory that gets one file per process with its whole output, or None.
        remote_shell: Command that reaches other hosts, called as `ssh` is.
        grace: Seconds between SIGTERM and SIGKILL; before that, where there are parameter servers,
            what they and the workers get to end by themselves after the chief.
        max_restarts: How often each worker that a signal ended is started again, where there are
            parameter servers. Without, a lost rank ends the job.
        stdout: Where the ranks' standard output goes; `sys.stdout` when None.
        stderr: Where the ranks' standard error goes; `sys.stderr` when None.

    Attributes:
        job_id: The mark (DTK_JOB) every process of the job carries.

    >>> import sys
    >>> from dtk.launch.plan import plan
    >>> with Job(plan([sys.executable, "-c", "print('hello')"], workers=1)) as job:
    ...     job.wait(timeout=60)
    [0] hello
    0
    """

    def __init__(
        self,
        processes: Sequence[Process],
        *,
        output_dir: str | os.PathLike[str] | None = None,
        remote_shell: str = ssh.DEFAULT_REMOTE_SHELL,
        grace: float = 5.0,
        max_restarts: int = 3,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
    ) -> None:
        if not processes:
            raise ClusterError("a job needs at least one process; make them with dtk.launch.plan")
        self.processes = tuple(processes)
        self.output_dir = None if output_dir is None else Path(output_dir)
        # A job started by a rank of another job ends with it.
        self.job_id = "/".join(filter(None, (os.environ.get("DTK_JOB"), uuid.uuid4().hex)))
        self._remote_shell = remote_shell
        self._grace = grace
        self._max_restarts = max_restarts
        self._streams = (stdout, stderr)
        self._ranks: list[Rank] = []
        self._ending = ending.choose(self.processes, self._ranks)
        self._held: contextlib.ExitStack = contextlib.ExitStack()
        self._changed = threading.Condition()
        self._write_lock = threading.Lock()
        self._stopping = False
        self._hurry = False
        self._broken_pipe = False
        self._done = threading.Event()
        self._started = False
        self._culprit: Rank | None = None
        self._code = 0

    def start(self) -> Job:
        """Start every process; may be called from any thread.

        Returns:
            The job itself.

        Raises:
            ClusterError: A process cannot be started, a port is taken, or `output_dir` is unusable.
            CommunicatorError: Horovod is asked for and not installed.
        """
        if self._started:
            raise ClusterError("this job was started before; make a new Job")
        self._started = True
        try:
            self._start_all()
        except BaseException:
            self._stopping = self._hurry = True
            self._end_all()
            self._done.set()
            raise
        threading.Thread(target=self._supervise, name="dtk job", daemon=True).start()
        return self

    def wait(self, timeout: float | None = None) -> int:
        """Wait until every process has ended.

        Args:
            timeout: Seconds; None waits for ever.

        Returns:
            0, or the exit code of the first process that failed: 128 + signal if a signal ended
            it, 143 after `stop()`. A chief that fails of a lost parameter server lends its own.

        Raises:
            TimeoutError: Processes still run (and go on running).
        """
        if not self._started:
            raise ClusterError("this job was not started; call start() first")
        if not self._done.wait(timeout):
            names = ", ".join(rank.process.name for rank in self._ranks if rank.code is None)
            raise TimeoutError(f"after {timeout} s still running: {names}; wait longer or stop()")
        return self._code

    def stop(self, hurry: bool = False) -> None:
        """End every process and wait for it; an interrupt meanwhile cuts the grace short.

        Args:
            hurry: Give no grace at all. Once all have ended there is nothing left to do.
        """
        self._hurry |= hurry
        interrupt: BaseException | None = None
        while True:
            try:
                with self._changed:
                    self._stopping = True
                    self._changed.notify_all()
                if self._started:
                    self._done.wait()
                break
            except BaseException as error:
                # Going on to wait: leaving now would leave processes behind.
                interrupt = interrupt or error
                self._hurry = True
        if interrupt is not None:
            raise interrupt

    def __enter__(self) -> Job:
        return self if self._started else self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def returncodes(self) -> dict[str, int | None]:
        """Exit code of every process by name; None while it runs."""
        return {rank.process.name: rank.code for rank in self._ranks}

    @property
    def failure(self) -> tuple[Process, int, str] | None:
        """The first process that failed, its exit code and its last output; None without a "
        "failure."""
        if self._culprit is None or self._culprit.code is None:
            return None
        words = "\n".join(self._culprit.last_words())
        return self._culprit.process, self._culprit.code, words

    @property
    def pids(self) -> dict[str, int]:
        """Process id by name (the remote shell's for a process on another host)."""
        return {rank.process.name: rank.popen.pid for rank in self._ranks}

    # Starting.

    def _start_all(self) -> None:
        if self.output_dir is not None:
            try:
                self.output_dir.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ClusterError(
                    f"output directory {self.output_dir} cannot be made: {error.strerror}"
                ) from None
        guard = local.Guard(self.job_id, self._grace)
        self._held.callback(guard.close)
        shared: dict[str, str] = {}
        if rendezvous.is_needed(self.processes):
            server = rendezvous.Rendezvous(self.processes)
            self._held.callback(server.close)
            shared = server.env
        local_hosts = {p.host for p in self.processes if local.is_local(p.host)}
        for process in self.processes:
            if process.address and process.host in local_hosts:
                self._hold_port(process)
        for process in self.processes:
            self._start_one(process, {**process.env, **shared}, process.host not in local_hosts)

    def _hold_port(self, process: Process) -> None:
        host, _, port = process.address.rpartition(":")
        try:
            self._held.enter_context(agent.reserve(host, int(port)))
        except OSError as error:
            raise ClusterError(
                f"{process.name}: port {port} of {host} is taken ({error.strerror}); plan the "
                "job again"
            ) from None

    def _start_one(self, process: Process, env: dict[str, str], remote: bool) -> None:
        rank = Rank(process, env, remote, self._popen(process, env, remote))
        self._ranks.append(rank)
        if self.output_dir is not None:
            name = process.name.replace(" ", "-") + ".log"
            rank.file = open(self.output_dir / name, "w", encoding="utf-8")  # noqa: SIM115
        self._attend(rank)

    def _popen(
        self, process: Process, env: Mapping[str, str], remote: bool
    ) -> subprocess.Popen[bytes]:
        try:
            if not remote:
                return local.start(process.argv, env, self._mark(process), process.cores)
            return ssh.start(
                process.host,
                process.argv,
                env,
                self._mark(process),
                address=process.address,
                cores=process.cores,
                grace=self._grace,
                remote_shell=self._remote_shell,
            )
        except OSError as error:
            program = self._remote_shell.split()[0] if remote else process.argv[0]
            raise ClusterError(
                f"{process.name}: cannot start {program}: {error.strerror}; check that it exists"
            ) from None

    def _mark(self, process: Process) -> str:
        """Give the mark of one process and its children: they end at different times."""
        return f"{self.job_id}/{process.name.replace(' ', '-')}"

    def _attend(self, rank: Rank) -> None:
        """Start the threads that read what a process writes, and note its end."""
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
        threading.Thread(target=self._reap, args=(rank,), daemon=True).start()

    # Watching, each in a thread of its own.

    def _read(self, rank: Rank, pipe: IO[bytes], stream: TextIO, stderr: bool) -> None:
        prefix = self._prefix(rank, stream)
        level = rank.process.env.get("TF_CPP_MIN_LOG_LEVEL")
        with pipe:
            while raw := pipe.readline(1 << 16):
                # A progress bar rewrites its line with carriage returns: what counts is what it
                # shows last.
                line = raw.decode("utf-8", "replace").rstrip("\r\n").rpartition("\r")[2]
                if rank.file is not None:
                    rank.file.write(line + "\n")
                    rank.file.flush()
                if stderr and is_noise(line, level):
                    continue
                rank.remember(line, stderr)
                self._write(stream, f"{prefix}{line}\n")

    def _prefix(self, rank: Rank, stream: TextIO) -> str:
        width = max(len(process.label) for process in self.processes)
        text = f"[{rank.process.label:>{width}}] "
        if stream.isatty() and not os.environ.get("NO_COLOR"):
            index = self.processes.index(rank.process)
            return click.style(text, fg=_COLORS[index % len(_COLORS)])
        return text

    def _write(self, stream: TextIO, text: str) -> None:
        with self._write_lock:
            try:
                stream.write(text)
                stream.flush()
            except (OSError, ValueError):
                # Nobody reads on (`dtk run ... | head`): end the job as the shell would.
                with self._changed:
                    self._broken_pipe = self._stopping = True
                    self._changed.notify_all()

    def _reap(self, rank: Rank) -> None:
        code = rank.popen.wait()
        with self._changed:
            rank.ended(code)
            self._changed.notify_all()

    def _supervise(self) -> None:
        try:
            culprit = self._judge()
            # Decided now: ending the others gives them exit codes too.
            code = self._exit_code(culprit)
            self._culprit = culprit
            self._let_serve_out()
            self._end_all()
            self._code = 128 + signal.SIGPIPE if self._broken_pipe and not culprit else code
            if culprit is not None:
                self._report(culprit)
        finally:
            self._done.set()

    def _judge(self) -> Rank | None:
        """Wait for what ends the job, and tell whose failure it is, if anyone's."""
        culprit = None
        while culprit is None:
            self._watch()
            if self._stopping or not self._ending.failures():
                return None
            self._settle()
            culprit = self._ending.culprit()
        if culprit.process.role == "ps":
            self._hear_chief(culprit)
        return None if self._stopping else culprit

    def _is_over(self) -> bool:
        return self._stopping or self._ending.over

    def _watch(self) -> None:
        """Wait for the end, and meanwhile replace what can be."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_over() or bool(self._ending.lost()))
                # Where many die at once, the chief may be among them: hence the moment.
                if self._changed.wait_for(self._is_over, ending.TIE):
                    return
                lost = self._ending.lost()
            for rank in lost:
                self._replace(rank)

    def _settle(self) -> None:
        """Wait until it shows who failed first.

        That rank may still be shutting down when its peers have already died of the broken
        connection; it gets the moment it needs to be recognised.
        """
        began = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._stopping, ending.TIE)
            while not self._stopping and any(rank.in_trouble for rank in self._ranks):
                left = began + _SETTLE - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)

    def _exit_code(self, culprit: Rank | None) -> int:
        if culprit is None:
            stopped = any(rank.code != 0 for rank in self._ending.essential)
            return 128 + signal.SIGTERM if stopped else 0
        speaker = self._ending.speaker(culprit)
        return (speaker.code if speaker.failed else culprit.code) or 0

    # What only jobs with parameter servers come to.

    def _replace(self, rank: Rank) -> None:
        """Start a lost worker again, or say that the job goes on without it."""
        self._clear(rank)
        # The chief is rank 0, so worker 0 is rank 1.
        name = f"{rank.process.name} (worker {rank.process.rank - 1})"
        killer = signal_name(128 + rank.signal) or f"signal {rank.signal}"
        lost = f"{name} was killed by {killer}"
        if rank.restarts < self._max_restarts:
            rank.restarts += 1
            self._say(f"{lost}; starting it again ({rank.restarts} of {self._max_restarts})")
            try:
                self._start_again(rank)
                return
            except ClusterError as error:
                lost = str(error)
        elif self._max_restarts:
            lost += f" ({rank.restarts} of {self._max_restarts} restarts used)"
        rank.given_up = True
        workers = sum(process.role == "worker" for process in self.processes)
        left = len(self._ending.workers_left())
        self._say(
            f"{lost}; the job goes on with {left} of {workers} workers"
            if left
            else f"{lost}; no worker is left"
        )

    def _clear(self, rank: Rank) -> None:
        """End the children of a lost worker, and wait for its last output.

        They may hold its port, or the memory for want of which it was killed.
        """
        agent.end(self._mark(rank.process), grace=0.0)
        if rank.popen.stdin is not None:
            with contextlib.suppress(OSError):
                rank.popen.stdin.close()
        for reader in rank.readers:
            reader.join(2.0)

    def _start_again(self, rank: Rank) -> None:
        popen = self._popen(rank.process, rank.env, rank.remote)
        with self._changed:
            rank.started(popen)
        self._attend(rank)

    def _hear_chief(self, lost: Rank) -> None:
        """Give the chief time to notice that a parameter server is gone, and to say so."""
        chief = self._ending.speaker(lost)
        if chief.code is not None:
            return
        self._say(
            f"{lost.process.name} ended {lost.how}; the chief has {_FAREWELL:g} s to end by itself"
        )
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or chief.code is not None, _FAREWELL)

    def _let_serve_out(self) -> None:
        """Give what served the chief the grace to notice that it has ended."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._stopping or all(rank.code is not None for rank in self._ending.serving)
                ),
                self._grace,
            )

    # Ending.

    def _end_all(self) -> None:
        """End everything, wait for it, and let go of what the job held."""
        for rank in self._ranks:
            if rank.remote and rank.popen.stdin is not None:
                with contextlib.suppress(OSError):
                    rank.popen.stdin.close()
        agent.end(self.job_id, self._grace, lambda: self._hurry)
        # Other hosts have the same grace, and some time to answer.
        deadline = time.monotonic() + (0.5 if self._hurry else self._grace + 2.0)
        for rank in self._ranks:
            if rank.remote:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    rank.popen.wait(max(0.0, deadline - time.monotonic()))
                rank.popen.kill()
            rank.popen.wait()
        for rank in self._ranks:
            for reader in rank.readers:
                reader.join(2.0)
            if rank.file is not None:
                rank.file.close()
        self._held.close()

    def _say(self, text: str) -> None:
        self._write(self._streams[1] or sys.stderr, f"dtk run: {text}\n")

    def _report(self, rank: Rank) -> None:
        """Print the first failing rank's last output, so that it is what stands last."""
        text = f"dtk: {rank.process.name}, host {rank.process.host} failed first, {rank.how}"
        text += "." if len(self._ranks) == 1 else "; the others were ended."
        if rank.file is not None:
            text += f" All it wrote is in {rank.file.name}."
        words = rank.last_words()
        speaker = self._ending.speaker(rank)
        if speaker is not rank:
            lines = [*self._words_about(rank, speaker), text]
        else:
            text += " Its last output:" if words else " It wrote nothing."
            lines = [text, *words]
        self._write(self._streams[1] or sys.stderr, "\n".join(["", *lines, ""]))

    def _words_about(self, lost: Rank, chief: Rank) -> list[str]:
        """Give what the chief said of a lost parameter server, and what that said itself.

        A server that was killed could not say why: its last lines are only better than nothing.
        """
        verdict = chief.trace_since(lost.exited - _SETTLE)
        own = [] if verdict and lost.signal else lost.last_words()
        lines: list[str] = []
        for rank, words in ((chief, verdict), (lost, own)):
            if words:
                lines += [f"dtk: the last output of {rank.process.name}:", *words]
        return lines

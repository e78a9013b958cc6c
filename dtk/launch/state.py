"""State that the threads of a running job share."""

from __future__ import annotations

import threading


class JobState:
    """State of a job that its threads share, and the condition they wait on.

    Attributes:
        changed: Notified when a process has ended, or anything below has changed; held while a
            process is noted as ended or as started again.
        stopping: Whether the job is to end, whatever its processes do.
        hurry: Whether it is to end without grace.
        broken_pipe: Whether it ends because what the processes write can no longer be passed on.
        error: What the launcher itself has failed of, where its threads have.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.stopping = False
        self.hurry = False
        self.broken_pipe = False
        self.error: Exception | None = None

    def stop(self) -> None:
        """Ask for the end of the job."""
        with self.changed:
            self.stopping = True
            self.changed.notify_all()

    def lose_output(self) -> None:
        """Ask for the end of the job because its output can no longer be written."""
        with self.changed:
            self.broken_pipe = self.stopping = True
            self.changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Ask for the end of the job because a thread of the launcher's has failed.

        Args:
            error: What of.
        """
        with self.changed:
            self.error = self.error or error
            self.stopping = True
            self.changed.notify_all()

"""State that the threads of a running job share."""

from __future__ import annotations

import threading


class JobState:
    """State of a job that its threads share, and the condition they wait on."""

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
        """Ask for the end of the job because a thread of the launcher's has failed."""
        with self.changed:
            self.error = self.error or error
            self.stopping = True
            self.changed.notify_all()

"""Starting a job of ranks that wait for each other again, after it failed."""

from dtk.launch.attempts.states import Attempts, Over, Run, Wait
from dtk.launch.attempts.supervisor import Supervisor, answers

__all__ = ["Attempts", "Over", "Run", "Supervisor", "Wait", "answers"]

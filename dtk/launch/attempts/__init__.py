"""Starting a job of ranks that wait for each other again, after it failed."""

from dtk.launch.attempts.states import Attempts, AwaitHosts, Over, StartJob
from dtk.launch.attempts.supervisor import Supervisor, answers

__all__ = ["Attempts", "AwaitHosts", "Over", "StartJob", "Supervisor", "answers"]

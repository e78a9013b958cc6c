"""Starting a job's processes and seeing them to their end. No TensorFlow here.

>>> import sys
>>> from dtk.launch.job_run import JobRun
>>> JobRun(JobSpec(command=[sys.executable, "-c", "print('hello')"], workers=1)).wait()
[0] hello
0
"""

from dtk.launch.job import Job
from dtk.launch.plan import COMMUNICATORS, JobSpec, Process, assign
from dtk.launch.plan import check as check_plan

__all__ = ["COMMUNICATORS", "Job", "JobSpec", "Process", "assign", "check_plan"]

"""Starting a job's processes and seeing them to their end. No TensorFlow here.

>>> import sys
>>> with Job(plan([sys.executable, "-c", "print('hello')"], workers=1)) as job:
...     job.wait(timeout=60)
[0] hello
0
"""

from dtk.launch.job import Job
from dtk.launch.plan import COMMUNICATORS, Process, plan
from dtk.launch.plan import check as check_plan

__all__ = ["COMMUNICATORS", "Job", "Process", "check_plan", "plan"]

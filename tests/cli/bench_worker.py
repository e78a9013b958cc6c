"""What ranks of a job measure that needs no library; for test_bench_jobs.py."""

import os
import time


class Worker:
    def __init__(self, setting):
        self.rank = int(os.environ["RANK"])
        self.versions = {"nothing": "1"}
        print("a library talks")

    def build(self, task):
        if task == "allreduce 4000":
            time.sleep(60)
        if task == "allreduce 12000":
            return 0, {"mine": self.mine}
        return 0, {"wait": self.wait, "die": self.die, "half": "there is no half"}

    def wait(self, tick):
        print("a library talks")
        for _ in range(3):
            time.sleep(0.01)
            tick()
        return {"sent": self.rank}

    def mine(self, tick):
        self.wait(tick)
        return {"sent": int(os.environ.get("OF_MINE", "0"))}

    def die(self, tick):
        if self.rank == 1:
            raise RuntimeError("cannot go on")
        time.sleep(60)


class Fails:
    def __init__(self, setting):
        raise RuntimeError("cannot start")

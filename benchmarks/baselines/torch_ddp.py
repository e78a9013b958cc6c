"""PyTorch's DistributedDataParallel over Gloo, and PyTorch by itself: its own limit."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from torch_models import PROBLEMS


class Worker:
    """See `dtk.bench.worker.BenchWorker`."""

    def __init__(self, setting: dict[str, Any]):
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        dist.init_process_group("gloo")  # where and with whom is in MASTER_ADDR, RANK ...
        self.rank = dist.get_rank()
        # The version is a class of PyTorch's, which a process without PyTorch cannot receive.
        self.versions = {"PyTorch": str(torch.__version__)}
        self._batch, self._steps = setting["batch_size"], setting["steps"]

    def build(self, task: str) -> tuple[int, dict[str, Any]]:
        """See `dtk.bench.worker.BenchWorker`."""
        kind, _, size = task.partition(" ")
        if kind == "allreduce":
            return 0, {"all_reduce": self._sum(int(size))}
        torch.manual_seed(1)
        model, hooked, alone = (PROBLEMS[task].build() for _ in range(3))
        state = model.state_dict().values()
        # As Keras counts them: with moving statistics, without the number of steps, a scalar.
        parameters = sum(one.numel() for one in state if one.dim())
        ddp = DistributedDataParallel(model)
        turns = {"limit": self._train(alone, task), "ddp": self._train(ddp, task)}
        if PROBLEMS[task].sparse:
            return parameters, {**turns, "ddp fp16": "its hook takes no sparse gradients"}
        half = DistributedDataParallel(hooked)
        half.register_comm_hook(None, fp16_compress_hook)
        return parameters, {**turns, "ddp fp16": self._train(half, task)}

    def _sum(self, size: int) -> Any:
        values = torch.zeros(size // 4)

        def measure(tick: Any) -> None:
            for _ in range(self._steps + 1):
                dist.all_reduce(values)
                tick()

        return measure

    def _train(self, model: Any, task: str) -> Any:
        x, y = PROBLEMS[task].data(self._batch * (self._steps + 1))
        rows = torch.utils.data.TensorDataset(x, y)
        loss_of = torch.nn.CrossEntropyLoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def measure(tick: Any) -> None:
            # Rows are there already: a batch is a slice, and no loader stands in the way.
            for batch in range(self._steps + 1):
                own = slice(batch * self._batch, (batch + 1) * self._batch)
                x, y = rows[own]
                optimizer.zero_grad()
                loss = loss_of(model(x), y)
                loss.backward()
                optimizer.step()
                loss.item()
                tick()

        return measure

"""Let the ranks of a job share one card, and send by NCCL.

NCCL takes one rank for each card of a host. So each rank says that it is a host of its own: they
send over loopback. CUDA, cuDNN, NCCL and the numbers are real; the speed is not.
"""

from __future__ import annotations

import functools
import subprocess

ASKED = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]


@functools.cache
def uuid() -> str:
    """Ask NVIDIA's driver for the first card."""
    return subprocess.run(ASKED, capture_output=True, text=True, check=True).stdout.split()[0]


def environment(rank: int) -> dict[str, str]:
    """Return a rank's variables; CUDA reads them when TensorFlow lists devices."""
    return {
        # CUDA takes the beginning of a card's name as well, and dtk another name for another card.
        "CUDA_VISIBLE_DEVICES": uuid()[: 20 + rank],
        "NCCL_HOSTID": f"rank-{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        # By default the first rank takes all memory of the card.
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        # 10 bits for a product's factors are too few to compare sums of 24 bits by.
        "NVIDIA_TF32_OVERRIDE": "0",
    }

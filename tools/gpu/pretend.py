"""Run a program as if this machine had GPUs.

    pretend.py 2 dtk run -n 2 --communicator collective train.py

TensorFlow finds the cards, places and copies as it does on real ones, and its own NCCL collectives
sum between processes (pretended/cuda.c says how). What that shows is where tensors are, what is
sent in which order, and the numbers. No speed; and no XLA, cuDNN and cuBLAS, so a script gives
`compile` jit_compile=False, and for convolutions also says
`tf.config.optimizer.set_experimental_options({"layout_optimizer": False})`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = Path(__file__).with_name("pretended")
BUILT = Path(__file__).parents[2] / "build" / "pretended"
# What TensorFlow 2.16 and later open, and the management library.
NAMES = (
    *("libcuda.so.1", "libcudart.so.12", "libnccl.so.2", "libnvidia-ml.so.1", "libcupti.so.12"),
    *("libcublas.so.12", "libcublasLt.so.12", "libcudnn.so.9", "libcufft.so.11", "libcurand.so.10"),
    *("libcusolver.so.11", "libcusparse.so.12", "libnvrtc.so.12"),
)


def environment(cards: int) -> dict[str, str]:
    """Build what stands for CUDA if needed; return the variables that make a process find it.

    Args:
        cards: How many GPUs the machine pretends to have.
    """
    path = os.pathsep.join([str(_built()), os.environ.get("LD_LIBRARY_PATH", "")]).rstrip(":")
    return {"LD_LIBRARY_PATH": path, "PRETENDED_GPUS": str(cards)}


def _built() -> Path:
    """Return the folder of the libraries; another TensorFlow has another one."""
    told = "import tensorflow as tf; print(*tf.sysconfig.get_compile_flags());"
    told += "print(*tf.sysconfig.get_link_flags()); print(tf.sysconfig.get_include())"
    version = hashlib.sha256(sys.prefix.encode())
    for source in sorted(SOURCES.iterdir()):
        version.update(source.read_bytes())
    folder = BUILT / version.hexdigest()[:16]
    if folder.exists():
        return folder
    if "tensorflow" in sys.modules:
        config = sys.modules["tensorflow"].sysconfig
        compiling, linking = map(" ".join, (config.get_compile_flags(), config.get_link_flags()))
        headers = config.get_include()
    else:  # to import it here would start it before it sees the cards
        asked = [sys.executable, "-c", told]
        found = subprocess.run(asked, capture_output=True, text=True, check=True)
        compiling, linking, headers = found.stdout.splitlines()
    external = Path(headers, "external")
    inside = ("cuda_cudart", "cuda_nccl", "cuda_nvcc")
    cuda = [f"-I{external / name / 'include'}" for name in inside]
    cuda.append(f"-I{external / 'cuda_cccl' / 'libcudacxx' / 'include'}")
    BUILT.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=BUILT))
    shared = ["-shared", "-fPIC", "-w"]  # TensorFlow's headers and NVIDIA's are not ours to mend
    ours = [*cuda, str(SOURCES / "cuda.c"), "-o", str(made / "libpretended.so")]
    theirs = [*compiling.split(), str(SOURCES / "kernels.cc"), "-o", str(made / "kernels.so")]
    subprocess.run(["gcc", *shared, "-O1", *ours], check=True)
    subprocess.run(["g++", *shared, "-O0", *theirs, *linking.split()], check=True)
    for name in NAMES:
        (made / name).symlink_to("libpretended.so")
    try:
        made.rename(folder)
    except OSError:
        if not folder.exists():
            raise
        shutil.rmtree(made)  # another process was faster
    return folder


def main() -> None:
    """Become the program."""
    if len(sys.argv) < 3 or not sys.argv[1].isdigit():
        sys.exit(f"usage: {Path(__file__).name} CARDS PROGRAM [ARGUMENT...]")
    if shutil.which(sys.argv[2]) is None:
        sys.exit(f"there is no program {sys.argv[2]!r}: give its path, or activate its environment")
    os.environ.update(environment(int(sys.argv[1])))
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()

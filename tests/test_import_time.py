"""`import dtk` is cheap and `dtk --help` is instant: neither imports TensorFlow."""

import resource
import statistics
import subprocess
import sys

import pytest

HEAVY = ("tensorflow", "keras", "numpy", "horovod")


def seconds(code: str) -> float:
    """CPU seconds, which do not grow with what runs beside the test."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_import_dtk_takes_under_100_ms():
    seconds("import dtk")  # writes the byte code
    extra = [seconds("import dtk") - seconds("pass") for _ in range(5)]
    assert statistics.median(extra) < 0.1, extra


def test_import_dtk_leaves_tensorflow_out():
    code = f"import sys, dtk; print([name for name in {HEAVY} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


@pytest.mark.parametrize(
    "arguments",
    [["--help"], *([name, "--help"] for name in ("bench", "plan", "doctor", "install-horovod"))],
    ids=" ".join,
)
def test_help_leaves_tensorflow_out(arguments):
    code = (
        "import sys; from dtk.cli.main import main\n"
        f"sys.argv = {['dtk', *arguments]}\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    out = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert "Usage: " in out
    assert out.strip().splitlines()[-1] == "[]"

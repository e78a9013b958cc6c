"""`import dtk` is cheap and `dtk --help` is instant: neither imports TensorFlow."""

import resource
import statistics
import subprocess
import sys

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


def test_help_leaves_tensorflow_out():
    commands = [[], ["bench"], ["plan"], ["doctor"], ["install-horovod"]]
    code = (
        "import sys; from dtk.cli.main import main\n"
        f"for command in {commands}:\n"
        "    sys.argv = ['dtk', *command, '--help']\n"
        "    try:\n        main()\n"
        "    except SystemExit as end:\n        assert not end.code, end.code\n"
        f"    print([name for name in {HEAVY} if name in sys.modules])"
    )
    out = subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()
    assert sum(line.startswith("Usage: ") for line in out) == out.count("[]") == len(commands)

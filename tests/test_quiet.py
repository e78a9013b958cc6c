"""TensorFlow's start-up noise stays off the screen; everything else arrives, whatever happens."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from dtk import quiet
from dtk.launch.job_processes import bootstrapped

from support.launched import dtk_run

pytestmark = pytest.mark.command

PREAMBLE = "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR"
LINE = "{}0000 00:00:1795249997.071550   13725 port.cc:153] {}"
NOTE, WARNING, ERROR = (
    LINE.format(kind, text)
    for kind, text in (("I", "oneDNN is on"), ("W", "careful"), ("E", "it is broken"))
)
NO_GPU = LINE.format("E", "failed call to cuInit: INTERNAL: CUDA error: UNKNOWN ERROR (303)")

# A stand-in for TensorFlow that writes as it does, from below Python, and is quick to import.
FAKE = f"""
import os, sys
def say(*lines):
    for line in lines:
        os.write(2, (line + "\\n").encode())
say({PREAMBLE!r}, {NOTE!r}, {WARNING!r}, {NO_GPU!r}, "a plain line")
"""


# A job of one process.
ALONE = '{"cluster": {"worker": ["127.0.0.1:1"]}, "task": {"type": "worker", "index": 0}}'


@pytest.fixture
def run(tmp_path):
    """Run code beside a fake tensorflow whose import ends with the given lines."""

    def start(code, inside="", level=None, fake=FAKE, **options):
        if fake is not None:
            (tmp_path / "tensorflow.py").write_text(fake + textwrap.dedent(inside))
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()])}
        env.pop("TF_CPP_MIN_LOG_LEVEL", None)
        env |= {"DTK_RUN": "1", "TF_CONFIG": ALONE}
        if level is not None:
            env["TF_CPP_MIN_LOG_LEVEL"] = level
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            capture_output=True,
            text=True,
            timeout=60,
            env=bootstrapped(env),
            **options,
        )

    return start


@pytest.mark.parametrize(
    ("level", "dropped"),
    [(None, 0), ("", 0), ("0", 0), ("1", 2), ("2", 3), ("3", 4)],
)
def test_levels(level, dropped):
    lines = [PREAMBLE, NOTE, WARNING, ERROR, "Traceback (most recent call last):"]
    assert [line for line in lines if quiet.is_noise(line, level, gpu=True)] == lines[:dropped]


def test_what_a_script_logs_by_absl_stays():
    line = "I1126 19:58:04.354673 140340726467456 train.py:3] epoch 1"
    assert not quiet.is_noise(line, "2")


def test_three_errors_are_noise_where_they_mean_nothing():
    """No GPU is here; whole numbers, which oneDNN supports on no processor; a worker has a GPU."""
    assert quiet.is_noise(NO_GPU, "2", gpu=False) and not quiet.is_noise(NO_GPU, "2", gpu=True)
    said = "oneDNN supports {} only on platforms with AVX-512. Falling back to the default ..."
    whole = [LINE.format("E", said.format(f"DT_{kind}")) for kind in ("BOOL", "INT32", "UINT8")]
    assert all(quiet.is_noise(line, "2", gpu=False) for line in whole)
    assert not any(quiet.is_noise(line, "0", gpu=False) for line in [NO_GPU, *whole])
    assert not quiet.is_noise(LINE.format("E", said.format("DT_HALF")), "2", gpu=False)
    elsewhere = LINE.format("E", "NOT_FOUND: TensorFlow device GPU:0 was not registered")
    assert quiet.is_noise(elsewhere, "2", gpu=True) and not quiet.is_noise(elsewhere, "0", gpu=True)


def test_the_import_is_quiet_and_what_is_not_noise_comes_through(run):
    done = run(
        f"""
        import sys, dtk
        assert "tensorflow" not in sys.modules
        import tensorflow
        tensorflow.say({NOTE!r})
        """,
        inside=f"say({ERROR!r})\nprint('from Python', file=sys.stderr)",
    )
    assert done.returncode == 0
    assert done.stderr.splitlines() == ["a plain line", ERROR, "from Python", NOTE]


def test_nothing_is_left_behind(run):
    done = run(
        """
        import os, sys, dtk
        fds, path = os.listdir("/proc/self/fd"), len(sys.meta_path)
        before = os.fstat(2)
        import tensorflow
        assert os.fstat(2) == before
        assert os.listdir("/proc/self/fd") == fds
        assert len(sys.meta_path) == path - 1
        assert "exec_module" not in vars(tensorflow.__spec__.loader)
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            print("no child")
        """
    )
    assert (done.returncode, done.stdout) == (0, "no child\n"), done.stderr


@pytest.mark.parametrize(
    ("level", "seen"),
    [
        ("0", [PREAMBLE, NOTE, WARNING, NO_GPU, "a plain line"]),
        ("1", [WARNING, "a plain line"]),
        ("3", ["a plain line"]),
    ],
)
def test_the_users_level_is_respected(run, level, seen):
    code = "import os, dtk, tensorflow\nprint(os.environ['TF_CPP_MIN_LOG_LEVEL'])"
    done = run(code, level=level)
    assert done.stdout == f"{level}\n"
    assert done.stderr.splitlines() == seen


def test_tensorflow_before_dtk_is_quiet_too(run):
    done = run("import tensorflow, dtk\nimport tensorflow")
    assert done.stderr.splitlines() == ["a plain line"]


def test_a_failing_import_shows_its_traceback(run):
    done = run("import dtk\nimport tensorflow", inside=f"say({ERROR!r})\nimport no_such_module")
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[:3] == ["a plain line", ERROR, "Traceback (most recent call last):"]
    assert lines[-1] == "ModuleNotFoundError: No module named 'no_such_module'"


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("os.abort()", -signal.SIGABRT),
        ("os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("os._exit(3)", 3),
        ("sys.exit(4)", 4),
    ],
)
def test_the_last_words_of_a_process_that_ends_inside_arrive(run, end, code):
    words = "x" * 100_000  # more than a pipe holds
    done = run(
        "import dtk, tensorflow",
        inside=f"say({ERROR!r}, 'x' * 100_000)\nos.write(2, b'no newline')\n{end}",
    )
    assert done.returncode == code
    assert done.stderr == f"a plain line\n{ERROR}\n{words}\nno newline"


def test_an_abort_inside_shows_faulthandlers_traceback(run):
    done = run(
        "import faulthandler, dtk\nfaulthandler.enable()\nimport tensorflow", inside="os.abort()"
    )
    assert "Fatal Python error: Aborted" in done.stderr
    assert "tensorflow.py" in done.stderr


def test_ctrl_c_inside_ends_it_and_loses_nothing(run):
    done = run(
        "import dtk, tensorflow",
        inside="""
            import signal, time
            # Who starts the tests in the background may have made them deaf to it.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            say("working")
            os.killpg(0, signal.SIGINT)
            time.sleep(30)
        """,
        start_new_session=True,
    )
    lines = done.stderr.splitlines()
    assert lines[:2] == ["a plain line", "working"]
    assert lines[-1] == "KeyboardInterrupt"


def test_a_program_started_inside_does_not_hold_the_import_up(run):
    started = time.monotonic()
    done = run(
        """
        import dtk, tensorflow, time
        tensorflow.say("imported")
        tensorflow.child.wait()
        """,
        inside="""
            import subprocess
            child = subprocess.Popen(["sh", "-c", "sleep 2; echo late >&2"])
        """,
    )
    assert done.stderr.splitlines() == ["a plain line", "imported", "late"]
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("lost", ["os.close(2)", "sys.executable = '/nowhere/python'"])
def test_without_standard_error_or_interpreter_the_import_works(run, lost):
    done = run(f"import os, sys, dtk\n{lost}\nimport tensorflow\nprint('ok')", fake="x = 1\n")
    assert (done.returncode, done.stdout) == (0, "ok\n")


def test_a_filter_inside_a_filter_is_the_same_filter(run):
    done = run(
        f"""
        import os, dtk
        from dtk import quiet
        with quiet.filtered():
            with quiet.filtered():
                os.write(2, b"{NOTE}\\n")
            os.write(2, b"{NOTE}\\nkept\\n")
        """
    )
    assert done.stderr == "kept\n"


REAL = """
import dtk, sys
import keras, numpy as np, tensorflow as tf
for strategy in (dtk.strategies.MirroredStrategy(2), dtk.auto_strategy()):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    with strategy.scope():
        model.compile("sgd", "mse")
    if strategy.size == 1:
        model.fit(np.zeros((8, 4)), np.zeros((8, 1)), verbose=0)
print("trained", file=sys.stderr)
"""


def test_a_real_start_prints_nothing_of_its_own(tmp_path):
    (tmp_path / "train.py").write_text(REAL)
    done = dtk_run("-n", "1", tmp_path / "train.py")
    assert (done.returncode, done.stderr) == (0, "[0] trained\n")


def test_importing_dtk_changes_nothing_in_a_process_of_the_users_own():
    """Breaks as imports, output or garbage collection that behave otherwise beside dtk."""
    code = """
        import gc, os, signal, sys, threading
        def state():
            return (
                [*sys.meta_path], [*sys.path_hooks], gc.isenabled(), gc.get_freeze_count(),
                os.fstat(2), threading.active_count(), signal.getsignal(signal.SIGTERM),
                sys.excepthook,
            )
        before, variables = state(), dict(os.environ)
        import dtk
        print(state() == before, sorted(set(os.environ.items()) - set(variables.items())))
    """
    env = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    env |= {"DTK_RUN": "1", "TF_CONFIG": ALONE, "DTK_STALL_TIMEOUT": "5"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        env=env,
        start_new_session=True,  # as of a rank
        check=False,
    )
    assert done.stdout == "True [('TF_CPP_MIN_LOG_LEVEL', '2')]\n", done.stderr

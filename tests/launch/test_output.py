"""Between ranks and whoever reads: full, slow, closed and narrow streams, bars, and warnings."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import subprocess
import threading
import time

import pytest

from dtk.launch.output import EqualLines
from dtk.launch.screen import Pace, ShownText, clipped

from support.launched import DTK_RUN, a_job, ranks, until

pytestmark = pytest.mark.command

COLLECTIVE = (*DTK_RUN, "-n", "2", "--communicator", "collective")


def python(code, workers=2):
    """Ranks that run some code, with their number in r."""
    begin = "import os, sys, time\nr = int(sys.argv[1])\n"
    return ranks(begin + code, workers, PYTHONIOENCODING="utf-8")


@pytest.fixture
def in_shell(tmp_path):
    """Run a script by `dtk run -n 2` from a shell; returns the finished process."""

    def in_shell(code, shell='exec "$@"', **env):
        script = tmp_path / "train.py"
        script.write_text(code)
        return subprocess.run(
            ["sh", "-c", shell, "sh", *COLLECTIVE, str(script)],
            capture_output=True,
            timeout=120,
            env={**os.environ, **env},
        )

    return in_shell


def test_a_full_disk_under_the_files_changes_no_exit_code(run, tmp_path):
    """The job ended with 0, and a rank's 7 was not seen; or it hung."""
    (tmp_path / "rank-0.log").symlink_to("/dev/full")
    code, out, err, _ = run(python("print('a' * 100_000)\nprint('b')"), output_dir=tmp_path)
    assert code == 0
    assert out.count("b\n") == 2
    told = f"dtk run: {tmp_path}/rank-0.log takes nothing: No space left on device. "
    assert err.count(told) == 1
    assert (tmp_path / "rank-1.log").read_text().endswith("\nb\n")
    code, _, err, _ = run(python("print('a')\nsys.exit(7 * r)"), output_dir=tmp_path)
    assert code == 7
    assert "rank 1, host localhost, failed first, with exit code 7;" in err


def test_a_launcher_that_fails_itself_says_so_and_does_not_end_with_0(run):
    class Broken(io.StringIO):
        def write(self, text):
            raise RuntimeError("a fault of the launcher's")

    err = io.StringIO()
    with a_job(python("print('a')"), stdout=Broken(), stderr=err, grace=1.0) as job:
        assert job.wait(timeout=60) == 70
    assert "dtk run: the launcher itself has failed, and ends the job:\nTraceback" in err.getvalue()
    assert "RuntimeError: a fault of the launcher's" in err.getvalue()


def test_supervision_that_fails_keeps_the_culprits_code(monkeypatch):
    err = io.StringIO()
    with monkeypatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr("dtk.launch.outcome.JobOutcome.failure_report", lambda *_: 1 / 0)
        job = stack.enter_context(a_job(python("sys.exit(7)", 1), stderr=err, grace=1.0))
        assert job.wait(timeout=60) == 7
    assert "ZeroDivisionError" in err.getvalue()


def test_what_a_stream_cannot_encode_is_replaced(in_shell):
    """The job was ended with 141, without a word."""
    code = "import sys\nsys.stdout.buffer.write('é ━ done\\n'.encode())"
    done = in_shell(code, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, b"")
    assert sorted(done.stdout.splitlines()) == [b"[0] ? ? done", b"[1] ? ? done"]


@pytest.mark.parametrize(
    ("to", "why"), [("> /dev/full", "No space left on device"), (">&-", "it is closed")]
)
def test_a_stream_that_takes_nothing_ends_no_job(in_shell, to, why):
    code = "import sys\nprint('a' * 9000)\nprint('end', file=sys.stderr)"
    done = in_shell(code, f'exec "$@" {to}')
    assert done.returncode == 0, done.stderr
    told = done.stderr.decode().splitlines()
    assert f"dtk run: standard output takes nothing: {why}. The job goes on without" in told
    assert sum("end" in line for line in told) == 1


def test_a_reader_that_has_enough_is_told_what_that_means(in_shell):
    shell = '("$@"; echo $? >&2) | head -1'
    done = in_shell("import time\nfor i in range(600): print(i); time.sleep(0.2)", shell)
    assert done.stdout in (b"[0] 0\n", b"[1] 0\n")
    assert done.stderr.decode() == (
        "dtk run: nobody reads standard output any more, as after `| head`: the job is ended, with "
        "exit code 141\n141\n"
    )


def test_a_job_whose_reader_sleeps_can_be_stopped():
    read, write = os.pipe()
    with open(write, "w") as out:
        job = a_job(python("while True: print('a' * 99)"), stdout=out, grace=1.0).start()
        until(lambda: job._output.waits, 60)
        stopping = threading.Thread(target=job.stop)
        stopping.start()
        stopping.join(20)
        was_stopped = not stopping.is_alive()
        os.close(read)  # which ends the job in any case
        stopping.join(20)
    assert was_stopped and job.wait(timeout=0) == 143


def shown(*written):
    text, lines = ShownText(), []
    for now, data in enumerate(written):
        lines += text.feed(data if isinstance(data, bytes) else data.encode(), now / 10)
    return lines, text


@pytest.mark.parametrize(
    ("written", "lines", "rows"),
    [
        (["a\nb"], ["a"], ["b"]),
        (["é".encode()[:1], "é".encode()[1:] + b"\n"], ["é"], []),
        ([b"\xff\n"], ["�"], []),
        (["50%\r"], [], ["50%"]),
        (["50%\r", "60%"], [], ["60%"]),
        # Keras's
        (["\r1/3 loss: 4", "\b" * 12 + "\r3/3", "\n"], ["3/3"], []),
        (["|", "\b/", "\b-"], [], ["-"]),
        (["a\r\n", "b\r\r\n"], ["a", "b"], []),
        (["\x1b[?25l\r\x1b[2K", "50%", "\r\x1b", "[2K60%"], [], ["60%"]),
        (["bar\r   \r", "next\n"], ["next"], []),
        # rich's, of two tasks
        (["a 0\nb 0", "\r\x1b[2K\x1b[1A\x1b[2Ka 1\n\x1b[2Kb 1"], ["a 0"], ["a 1", "b 1"]),
        (["\x1b[?25la 0\nb 0", "\r\x1b[1A\x1b[2Ka 1\nb 1"], [], ["a 1", "b 1"]),
        (["a 0\nb 0\r\x1b[1A\x1b[2Ka 1\nb 1"], [], ["a 1", "b 1"]),
        # what is printed above them
        (["a\nb", "\r\x1b[1Ahello\na\nb", "\r\x1b[1Aa 2"], ["a", "hello"], ["a 2", "b"]),
        # tqdm's, one within another
        (["\r0/9", "\n\r1/3\x1b[A", "\n\r2/3\x1b[A"], [], ["0/9", "2/3"]),
        (["\r0/9\n\r1/3\x1b[A", "\r1/9"], [], ["1/9", "1/3"]),
    ],
)
def test_what_a_terminal_would_show(written, lines, rows):
    over, text = shown(*written)
    assert (over, text.rows) == (lines, rows)


def test_rows_that_are_left_for_long_are_over():
    _, text = shown("a\nb", "\r\x1b[1Aa\nb", "\ndone\n")
    assert text.settle(1.0) == []
    assert text.settle(10.0) == ["a", "b", "done"]
    assert text.feed(b"next\n", 10.0) == ["next"]


def test_a_file_gets_a_bars_line_every_few_seconds():
    text, pace = ShownText(), Pace(5.0)
    due = []
    for second in range(12):
        text.feed(f"\r{second} of 12".encode(), second)
        due += pace.due(text, second)
    assert due == ["6 of 12", "11 of 12"]
    text.feed(b"\nplain", 13.0)
    assert pace.due(text, 30.0) == []


def test_rows_fit_a_terminal():
    assert clipped("\x1b[32m━━━━\x1b[0m end", 3) == "\x1b[32m━━━\x1b[0m"
    assert clipped("日本", 3) == "日"


def test_warnings_of_all_ranks_are_shown_once(run, tmp_path):
    code = (
        "import warnings\nsys.stderr.write('rows of %d\\n' % r)\nwarnings.warn('careful')\n"
        "time.sleep(1)"
    )
    given, _, err, _ = run(python(code), output_dir=tmp_path)
    assert given == 0
    assert "[0] rows of 0\n" in err and "[1] rows of 1\n" in err
    assert err.count("] <string>:5: UserWarning: careful\n") == 1
    assert "careful" in (tmp_path / "rank-1.log").read_text()


def test_equal_lines_of_several_ranks_are_one():
    equal = EqualLines()
    for line in ("warning", "  code", "warning"):
        equal.add("[0]", line, 0.0)
    assert equal.due(0.1) == []
    for line in ("  code", "warning", "own", "warning"):
        equal.add("[1]", line, 0.2)
    assert equal.due(0.6) == [
        ("warning", ["[0]", "[1]"]),
        ("  code", ["[0]", "[1]"]),
        ("warning", ["[0]", "[1]"]),
    ]
    equal.add("[1]", "warning", 0.6)
    assert equal.due() == [("own", ["[1]"]), ("warning", ["[1]"])]
    equal.add("[0]", "own", 5.0)
    assert (equal.due(8.0), equal.late) == ([], 1)
    assert equal.due(11.0) == []
    equal.add("[2]", "own", 12.0)
    assert equal.due() == [("own", ["[2]"])]


def test_of_a_flood_few_lines_are_held():
    """All that a slow reader had not yet taken was in the launcher's memory."""
    equal = EqualLines()
    for number in range(10_000):
        equal.add("[0]", str(number), 0.0)
    assert not equal.is_full and equal.due(0.1) == []
    equal.add("[0]", "10000", 0.1)
    assert equal.is_full
    assert equal.due(0.1) == [("0", ["[0]"])]
    equal.add("[1]", "10000", 0.2)
    assert equal.due()[-1] == ("10000", ["[0]", "[1]"])


class Slow(io.StringIO):
    """A stream that takes a thousand lines a second."""

    def write(self, text):
        time.sleep(0.001)
        return super().write(text)


def test_a_flood_is_written_to_its_end_in_order():
    """What was being written when the job ended came after its report, or not at all."""
    err = Slow()
    code = (
        "if not r: time.sleep(60)\n"
        "for i in range(1500):\n    sys.stderr.write(f'{i}\\n')\n    time.sleep(i == 750)\n"
        "sys.exit(7)"
    )
    with a_job(python(code), stderr=err, grace=1.0) as job:
        assert job.wait(timeout=60) == 7
    flood, report = err.getvalue().split("\ndtk: ")
    assert flood == "".join(f"[1] {i}\n" for i in range(1500))
    assert report.startswith("rank 1, host localhost, failed first, with exit code 7;")
    assert report.endswith("\n1499\n")


BAR = """
import os, sys, time
r = int(os.environ["HOROVOD_RANK"]) if "HOROVOD_RANK" in os.environ else ROLE
for percent in range(0, 100, 10):
    sys.stdout.write(f"\\r{percent}% of rank {r}")
    time.sleep(0.05 if r else 0.25)  # rank 1 ends first, also where it begins late
    if percent == 50:
        sys.stderr.write(f"note of {r}\\n")
print(f"\\r100% of rank {r}", os.environ.get("COLUMNS"))
""".replace("ROLE", "__import__('json').loads(os.environ['TF_CONFIG'])['task']['index']")


def test_rank_0s_bar_is_drawn_anew_on_a_terminal(tmp_path):
    """It appeared when the epoch had ended."""
    script = tmp_path / "train.py"
    script.write_text(BAR)
    inherited = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    master, terminal = pty.openpty()
    with subprocess.Popen(
        [*COLLECTIVE, str(script)],
        stdout=terminal,
        stderr=terminal,
        env={**inherited, "TERM": "xterm", "NO_COLOR": "1"},
    ) as process:
        os.close(terminal)
        written = b""
        with contextlib.suppress(OSError):
            while read := os.read(master, 1 << 16):
                written += read
        assert process.wait(60) == 0
    os.close(master)
    text = written.decode().replace("\r\n", "\n")
    drawn = [frame for frame in text.split("\r\x1b[2K") if frame]
    bars = [frame for frame in drawn if frame.startswith("[0] ") and "\n" not in frame]
    assert len(bars) > 3 and all("% of rank 0" in bar for bar in bars)
    assert "[1] 100% of rank 1 None\n" in text and "% of rank 1" not in "".join(bars)
    # A line of another rank stands above the bar.
    assert any("[1] note of 1\n" in frame and "[0] " in frame.splitlines()[-1] for frame in drawn)
    lines = shown(written.replace(b"\r\n", b"\n"))[0]
    assert sum("100% of rank 0" in line for line in lines) == 1
    assert any(line == "[0] 100% of rank 0 75" for line in lines), lines

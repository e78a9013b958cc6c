"""Between ranks and whoever reads: full, slow, closed and narrow streams, bars, and warnings."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import subprocess
import sys
import threading
import time

import pytest

from dtk.launch import assign, output
from dtk.launch.output import EqualLines
from dtk.launch.screen import WrittenText

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
    text, lines = WrittenText(), []
    for data in written:
        lines += text.feed(data if isinstance(data, bytes) else data.encode())
    return lines, text.row


@pytest.mark.parametrize(
    ("written", "lines", "row"),
    [
        (["a\nb"], ["a"], "b"),
        (["é".encode()[:1], "é".encode()[1:] + b"\n"], ["é"], ""),
        ([b"\xff\n"], ["�"], ""),
        (["50%\r"], [], "50%"),
        (["50%\r", "60%"], [], "60%"),
        # Keras's
        (["\r1/3 loss: 4", "\b" * 12 + "\r3/3", "\n"], ["3/3"], ""),
        (["|", "\b/", "\b-"], [], "-"),
        # backspaces take back as many characters, and not the row
        (["Loading: 50%", "\b\b\b60%\b\b", "\b70%\n"], ["Loading: 70%"], ""),
        (["N\bNA\bA\n"], ["NA"], ""),
        (["a\r\n", "b\r\r\n"], ["a", "b"], ""),
        (["\x1b[?25l\r\x1b[2K", "50%", "\r\x1b", "[2K60%"], [], "60%"),
        (["bar\r   \r", "next\n"], ["next"], ""),
        (["x" * (1 << 20), "yz"], ["x" * (1 << 20) + "yz"], ""),
    ],
)
def test_what_a_terminal_would_show(written, lines, row):
    assert shown(*written) == (lines, row)


def test_a_bar_that_was_erased_leaves_no_line_at_the_end():
    text = WrittenText()
    assert text.feed(b"90%\r   \r") == [] == text.feed(b"", final=True)


def test_last_words_are_shown_though_a_process_that_has_left_holds_the_pipe(run):
    code = (
        "import subprocess\n"
        "subprocess.Popen(['setsid', '-f', 'sleep', '5'], env={'PATH': os.environ['PATH']})\n"
        "os.write(1, b'whole line\\nlast words')\n"
    )
    given, out, _, _ = run(python(code, 1))
    assert (given, out) == (0, "[0] whole line\n[0] last words\n")


def test_a_stream_may_be_no_more_than_a_write(run):
    class Tee:
        def write(self, text):
            written.append(text)

        def flush(self):
            """Have nothing to write."""

    written = []
    run(python("print('hello')", 1), stdout=Tee())
    assert "".join(written) == "[0] hello\n"


def test_a_file_gets_a_bars_line_now_and_then(run, tmp_path, monkeypatch):
    monkeypatch.setattr(output, "_LINE", 0.5)
    code = (
        "for i in range(20):\n    print(f'\\r{i} of 20', end='', flush=True)\n    time.sleep(0.1)\n"
        "print('\\nplain', end='')\ntime.sleep(1)"
    )
    given, out, _, _ = run(python(code), output_dir=tmp_path)
    assert given == 0
    for rank in range(2):
        *bar, last, plain = (tmp_path / f"rank-{rank}.log").read_text().splitlines()
        assert 1 < len(bar) < 5 and (last, plain) == ("19 of 20", "plain")
    # Of the first rank, there is as much to see where nothing can be drawn anew.
    assert 1 < len(re.findall(r"\[0\] \d+ of 20", out)) < 6
    assert re.findall(r"\[1\] .*", out) == ["[1] 19 of 20", "[1] plain"]


NESTED = """
import tqdm
for i in tqdm.tqdm(range(3)):
    for j in tqdm.tqdm(range(30)): time.sleep(0.02)
"""


def test_bars_of_tqdm_within_one_another_are_no_flood(run):
    """Each picture of the inner one began a line."""
    code, _, err, _ = run(assign([sys.executable, "-c", "import time\n" + NESTED], 1))
    assert code == 0
    ends = [re.findall(r"\d+/\d+", line) for line in err.splitlines()]
    assert ends == [["30/30"], ["30/30"], ["30/30"], ["3/3"]]


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


def test_of_a_flood_that_nobody_takes_no_more_is_held():
    """All that a slow reader had not yet taken was in the launcher's memory."""
    read, write = os.pipe()
    code = "while True: sys.stderr.write(f'{time.time()}\\n')"
    with (
        open(write, "w") as err,
        a_job(python(code), stdout=io.StringIO(), stderr=err, grace=1.0) as job,
    ):
        until(lambda: job._output.waits, 60)
        held = len(job._output._equal._held)
        time.sleep(1)
        assert len(job._output._equal._held) == held
    os.close(read)


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
print(f"\\r100% of rank {r}")
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
    text = re.sub(r"\r(?=\n)|\x1b\[(\?7.|m)", "", written.decode())
    drawn = [frame for frame in text.split("\r\x1b[2K") if frame]
    bars = [frame for frame in drawn if frame.startswith("[0] ") and "\n" not in frame]
    assert len(bars) > 3 and all("% of rank 0" in bar for bar in bars)
    assert "[1] 100% of rank 1\n" in text and "% of rank 1" not in "".join(bars)
    # A line of another rank stands above the bar.
    assert any("[1] note of 1\n" in frame and "[0] " in frame.splitlines()[-1] for frame in drawn)
    lines, _ = shown(written.replace(b"\r\n", b"\n"))
    assert sum("100% of rank 0" in line for line in lines) == 1
    assert "[0] 100% of rank 0" in lines


def test_a_slow_reader_gets_all_that_was_written(in_shell):
    code = "print('a' * 150_000, end='\\nend\\n')"
    done = in_shell(code, '"$@" | (sleep 8; cat)')
    assert done.stdout.count(b"a" * 150_000 + b"\n") == done.stdout.count(b"] end\n") == 2

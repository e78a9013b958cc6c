"""Real processes: whatever happens, all of them end, in time, and the user sees why."""

import io
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from dtk.errors import ClusterError
from dtk.launch import agent, assign, job_options, job_processes, ssh, supervisor
from dtk.launch.plan import Process
from dtk.launch.starter import Starter

from support.launched import a_job, dtk_run, pids, until

pytestmark = pytest.mark.command

RANK = (
    "import json, os, sys, time, signal; r = json.loads(os.environ['TF_CONFIG'])['task']['index']\n"
)
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
SLEEPS_DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def python(code, workers=2, **options):
    return assign([sys.executable, "-c", RANK + code], workers, **options)


def test_output_is_prefixed_by_rank_without_colours_and_kept_in_files(run, tmp_path):
    code = "print('hello', r); print('oops', r, file=sys.stderr)"
    given, out, err, _ = run(python(code), output_dir=tmp_path / "logs")
    assert given == 0
    assert sorted(out.splitlines()) == ["[0] hello 0", "[1] hello 1"]
    assert sorted(err.splitlines()) == ["[0] oops 0", "[1] oops 1"]
    assert sorted(p.name for p in (tmp_path / "logs").iterdir()) == ["rank-0.log", "rank-1.log"]
    assert sorted((tmp_path / "logs/rank-1.log").read_text().splitlines()) == ["hello 1", "oops 1"]


def test_colours_on_a_terminal_only(run, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    screen = Terminal()
    run(python("os.write(1, b'hello\\n')", 1), stdout=screen)
    assert screen.getvalue() == "\x1b[36m[0] \x1b[0mhello\n"


def test_each_rank_has_cores_of_its_own_and_none_of_another_launcher(run, monkeypatch):
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "HOROVOD_RANK", "PMIX_RANK", "DTK_JOINED"):
        monkeypatch.setenv(name, "5")
    monkeypatch.setenv("DTK_ALONE", "1")  # of a program that a rank has started, and not a rank
    here = sorted(os.sched_getaffinity(0))
    code = "from dtk.cluster import detect; print(detect().size, os.environ.get('PMI_RANK'), "
    _, out, err, _ = run(python(f"{code} *os.sched_getaffinity(0))"))
    told = [line.split()[1:] for line in out.splitlines()]
    assert [one[:2] for one in told] == [["2", "None"]] * 2, err
    if len(here) > 1:
        assert sorted(int(core) for one in told for core in one[2:]) == here
    assert sorted(os.sched_getaffinity(0)) == here, "the launcher keeps all of them"


def test_threads_of_one_core_are_side_by_side(tmp_path, monkeypatch):
    # Two packages of two cores of two threads, counted as Linux does: all second threads last.
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for one in range(8):
        place = tmp_path / f"cpu{one}" / "topology"
        place.mkdir(parents=True)
        (place / "physical_package_id").write_text(f"{one % 4 // 2}\n")
        (place / "core_id").write_text(f"{one % 2}\n")
    assert agent.cores(str(tmp_path)) == [0, 4, 1, 5, 2, 6, 3, 7]
    assert agent.cores(str(tmp_path / "nothing")) == list(range(8))


def test_large_tensors_get_huge_pages(run):
    offered = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    library, version = platform.libc_ver()
    new_enough = [int(part) for part in version.split(".") if part] >= [2, 35]
    asked = offered.exists() and "[madvise]" in offered.read_text()
    if library != "glibc" or not new_enough or not asked:
        pytest.skip("the kernel or the C library does not do that when it is asked")
    code = "large = bytearray(64 << 20); print(' hg' in open('/proc/self/smaps').read())"
    assert run(python(code, 1))[1] == "[0] True\n"


def test_bytes_that_are_no_text_and_progress_bars_do_not_break_the_output(run):
    code, out, _, _ = run(
        python(r"os.write(1, b'\xff 1%\r 2%\r\n' + b'x' * 200000 + b'\nend\n')", 1)
    )
    assert code == 0
    assert out.startswith("[0]  2%\n[0] xxx")
    assert out.endswith("\n[0] end\n")


KILL = "os.kill(os.getpid(), 9)"
LOSES = "if r == 1: sys.exit(0)\ntime.sleep(1)\nraise OSError("
LEFT = "dtk: rank 1, host localhost, left its script, with exit code 0, and"
# What ranks do, the job's exit code, what is said of the first failure, and how the last line ends.
ENDINGS = {
    "an exit code": ("if r == 1: sys.exit(7)\ntime.sleep(600)", 7, "rank 1", "It wrote nothing."),
    "a signal": (f"if r == 1: {KILL}\ntime.sleep(600)", 137, "by SIGKILL (exit code 137)", ""),
    "an abort": ("if r == 1: os.abort()\ntime.sleep(600)", 134, "by SIGABRT (exit code 134)", ""),
    "an exception, beside deaf ranks": (
        f"{DEAF}if r == 1: raise ValueError('boom')\ntime.sleep(600)",
        1,
        "rank 1, host localhost, failed first, with exit code 1",
        "ValueError: boom",
    ),
    # Its peer notices, and its process is gone first.
    "an exception of a rank that takes its time": (
        "import atexit\nif r == 1:\n    atexit.register(time.sleep, 0.6)\n"
        "    raise ValueError('the cause')\ntime.sleep(0.3)\nos.environ['x'] = 1",
        1,
        "rank 1,",
        "ValueError: the cause",
    ),
    "chained exceptions": (
        "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ValueError('boom') from e",
        1,
        "ZeroDivisionError",
        "ValueError: boom",
    ),
    # Rank 0 has lost its peer, and ends before the system says that the peer is dead.
    "a kill that is reported late": (
        f"if r == 0: raise ConnectionError('Socket closed')\ntime.sleep(1.5); {KILL}",
        137,
        "rank 1, host localhost, failed first, by SIGKILL",
        "",
    ),
    "a rank that leaves": (f"{LOSES}'Socket closed')", 1, "OSError: Socket closed", LEFT),
    "a failure after another has left well": (
        f"{LOSES}'the disk is full')",
        1,
        "rank 0, host localhost, failed first",
        "OSError: the disk is full",
    ),
}


@pytest.mark.parametrize(("code", "ends", "said", "last"), ENDINGS.values(), ids=ENDINGS)
def test_the_first_failure_is_seen_last_and_all_end(run, monkeypatch, code, ends, said, last):
    if last == LEFT:
        monkeypatch.setattr(supervisor, "LATE", 1.0)  # no other rank comes late
    given, _, err, seconds = run(python(code), max_restarts=3)
    assert given == ends
    assert seconds < 10
    assert said in err[err.index("\ndtk: ") :]
    assert last in err.splitlines()[-1]


def test_a_directory_that_every_rank_makes(run, tmp_path):
    """The rank that failed of it is named, and rank 0 and `strategy.is_chief` with it."""
    code = f"time.sleep(r)\nos.mkdir({str(tmp_path / 'logs')!r})\ntime.sleep(60)\n"
    _, _, err, _ = run(python(code))
    assert "rank 1, host localhost, failed first, with exit code 1" in err
    assert "FileExistsError" in err
    assert "rank 0 make it or unpack it, `if strategy.is_chief: os.mkdir(path)`" in err


def test_a_survived_traceback_is_not_taken_for_the_cause(run):
    code = (
        "import traceback\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    traceback.print_exc()\n"
        "for i in range(300):\n    print(i, file=sys.stderr)\nprint('bye')\nsys.exit(3)"
    )
    _, _, err, _ = run(python(code, 1))
    assert "ZeroDivisionError" not in err.split("dtk: ")[-1]
    assert err.split("dtk: ")[-1].splitlines()[-1] in ("299", "bye")


def test_a_killed_rank_is_followed_by_what_to_do_next(run):
    """Where nobody starts the job again; with servers, and with restarts, somebody does."""
    _, _, err, _ = run(python(f"if r == 1: {KILL}\ntime.sleep(600)"), max_restarts=0)
    assert err.endswith(
        "dtk: a script with dtk.callbacks.Checkpoint(directory, resume=True) goes on from its last "
        "checkpoint when it is started again; `dtk run --max-restarts 3 ...` does so by itself.\n"
    )
    _, _, err, _ = run(python("if r == 1: sys.exit(3)\ntime.sleep(600)"), max_restarts=0)
    assert "--max-restarts" not in err, "it would fail again"


def test_what_others_say_of_the_first_failure_is_left_out_of_the_screen(run, tmp_path):
    code = (
        f"if r == 1: print('about to go', file=sys.stderr, flush=True); {KILL}\n{DEAF}"
        "time.sleep(1.0)\n"
        "for _ in range(90): print('Connection reset by peer', file=sys.stderr, flush=True)\n"
        "sys.exit(1)"
    )
    given, _, err, _ = run(python(code), grace=5.0, output_dir=tmp_path, max_restarts=3)
    assert given == 137
    assert "Connection reset by peer" not in err
    assert err.endswith("90 lines, beside that. Its last output:\nabout to go\n")
    assert (tmp_path / "rank-0.log").read_text().count("Connection reset by peer\n") == 90


def test_a_crash_in_c_says_where_in_the_script(tmp_path):
    script = tmp_path / "crash.py"
    script.write_text("import ctypes\n\ndef crash():\n    ctypes.string_at(0)\n\ncrash()\n")
    done = dtk_run("-n", "1", script)
    assert done.returncode == 139
    assert "failed first, by SIGSEGV" in done.stderr
    assert re.search(r'crash.py", line 4 in crash\n', done.stderr.split("Its last output")[1])


def test_a_guard_that_is_stopped_keeps_no_job_from_ending(monkeypatch):
    monkeypatch.setattr(ssh, "_LEAVES", 0.5)
    before = set(psutil.Process().children())  # a world's guard may be among them
    with a_job(python("time.sleep(1)")) as job:
        started = set(psutil.Process().children()) - before
        (guard,) = [one for one in started if one.pid not in pids(job).values()]
        guard.suspend()
        assert job.wait(30) == 0
    assert not guard.is_running()


@pytest.mark.full_but("0")
@pytest.mark.parametrize("code", [3, 0])
def test_children_of_a_rank_end_too(run, alive, tmp_path, code):
    """Also those that left its session, or were given another environment.

    These are found by the session of a rank that has ended, or as descendants of one that has not.
    """
    spawn = (
        "import subprocess\n"
        f"c = [sys.executable, '-c', {SLEEPS_DEAF!r}]\n"
        "ps = [subprocess.Popen(c, env=e, start_new_session=new)\n"
        f"    for e, new in ((None, True), ({{}}, False), ({{}}, {code} and r == 1))]\n"
        f"open({str(tmp_path)!r} + f'/{{r}}', 'w').write(' '.join(str(p.pid) for p in ps))\n"
        f"time.sleep(600 if {code} and r == 1 else 1); sys.exit({code})"
    )
    given, _, _, seconds = run(python(spawn))
    assert given == code
    assert seconds < 15
    pids = [int(pid) for r in (0, 1) for pid in (tmp_path / str(r)).read_text().split()]
    assert len(pids) == 6 and not any(map(alive, pids))


def test_stop_ends_ranks_that_are_deaf_to_sigterm(run):
    job = a_job(python(DEAF + "print('ready')\ntime.sleep(600)"), grace=0.5, stdout=io.StringIO())
    threading.Thread(target=job.start).start()  # any thread will do
    until(lambda: pids(job).get("rank 1"))
    with pytest.raises(TimeoutError, match="still running: rank 0, rank 1"):
        job.wait(timeout=0.5)
    began = time.monotonic()
    job.stop()
    assert time.monotonic() - began < 5
    assert job_processes.members(job.job_id) == []
    assert job.wait() == 143
    job.stop()  # twice is fine


def test_sigterm_comes_first_so_that_a_rank_can_clean_up():
    code = (
        "def bye(*_):\n    print('saved'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, bye)\nprint('ready')\ntime.sleep(600)"
    )
    out = io.StringIO()
    with a_job(python(code, 1), stdout=out) as job:
        until(lambda: "ready" in out.getvalue())
    assert "[0] saved" in out.getvalue()
    assert job.wait() == 143


def test_a_planned_port_is_held_until_the_rank_listens(run):
    code = (
        "import socket\n"
        "where = json.loads(os.environ['TF_CONFIG'])['cluster']['worker'][r].split(':')\n"
        "s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
        "s.bind((where[0], int(where[1]))); s.listen(); print('listening')"
    )
    given, out, err, _ = run(python(code))
    assert (given, err) == (0, "")
    assert out.count("listening") == 2
    with (
        agent.reserve("127.0.0.1") as held,
        socket.socket() as stranger,  # without SO_REUSEADDR
        pytest.raises(OSError, match="in use"),
    ):
        stranger.bind(held.getsockname())


def test_a_taken_port_is_named_before_anything_starts():
    processes = python("pass")
    host, _, port = processes[1].address.rpartition(":")
    taken = pytest.raises(ClusterError, match=f"rank 1: port {port} of 127.0.0.1 is taken")
    with socket.create_server((host, int(port))), taken:
        a_job(processes).start()


def test_ports_are_held_before_servers_of_ranks_get_theirs(run, monkeypatch):
    """MPI's server got rank 1's port, now and then, and the job did not start."""
    processes, tried = python("pass"), []

    def start_mpi(starter):
        for process in processes:
            host, _, port = process.address.rpartition(":")
            with socket.socket() as server, pytest.raises(OSError, match="in use"):
                server.bind((host, int(port)))
            tried.append(process.name)

    monkeypatch.setattr(Starter, "_start_mpi", start_mpi)
    assert run(processes)[0] == 0
    assert tried == ["rank 0", "rank 1"]


def test_what_cannot_start_is_named_and_nothing_stays(tmp_path):
    processes = [
        *python("time.sleep(600)", 1),
        Process("rank 1", "worker", 1, "localhost", ("no-such-program",), {}),
    ]
    job = a_job(processes)
    with pytest.raises(ClusterError, match="rank 1: cannot start no-such-program"):
        job.start()
    assert job_processes.members(job.job_id) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(ClusterError, match="output directory .* cannot be made"):
        a_job(python("pass", 1), output_dir=tmp_path / "file").start()
    with pytest.raises(ClusterError, match="at least one process"):
        a_job([])


@pytest.mark.timeout(30)
def test_two_interrupts_while_a_job_starts_leave_nothing_running():
    """The second comes while the first one's end has begun: that end waited for ever."""
    job = a_job(assign([sys.executable, "-c", SLEEPS_DEAF], 2), grace=600.0)
    start, ask_for_the_end = job._starter.start, job._state.stop

    def interrupted(process):
        start(process)
        if process.rank == 1:
            raise KeyboardInterrupt

    def interrupted_once(*given):
        job._state.stop = ask_for_the_end
        raise KeyboardInterrupt

    job._starter.start, job._state.stop = interrupted, interrupted_once
    with pytest.raises(KeyboardInterrupt):
        job.start()
    assert not job_processes.members(job.job_id) and len(pids(job)) == 2
    job.stop()


def test_a_process_is_found_as_soon_as_it_was_started():
    """It was missed for a moment, and a job that was ended then left it running."""
    missed = 0
    for count in range(100):
        job = f"found-{os.getpid()}-{count}"
        with job_processes.start(("sleep", "600"), os.environ, job, ()) as process:
            missed += job_processes.members(job) != [process.pid]
            process.kill()
    assert not missed


def test_a_launcher_that_is_killed_leaves_nothing_running():
    command = [sys.executable, "-c", RANK + DEAF + "time.sleep(600)"]
    code = (
        "import sys, time\nfrom dtk.launch import Job, JobSpec, assign\n"
        f"spec = JobSpec(processes=tuple(assign({command!r}, 2)), grace=0.5)\n"
        "job = Job(spec).start()\n"
        "print(job.job_id, flush=True)\ntime.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        job_id = launcher.stdout.readline().strip()
        assert len(job_processes.members(job_id)) == 2
        launcher.kill()
    until(lambda: job_processes.members(job_id) == [], 10)


def test_tensorflows_start_up_noise_is_dropped_and_errors_stay(run, tmp_path):
    line = "{}0000 00:00:1795249997.071550   13725 port.cc:153] {}"
    lines = [
        "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
        line.format("I", "oneDNN custom operations are on"),
        line.format("W", "careful"),
        line.format("E", "wrong"),
    ]
    code = f"print({chr(10).join(lines)!r}, file=sys.stderr)"
    _, _, err, _ = run(python(code, 1, environ={}), output_dir=tmp_path)
    assert err == f"[0] {lines[3]}\n"
    assert (tmp_path / "rank-0.log").read_text().splitlines() == lines
    _, _, err, _ = run(python(code, 1, environ={"TF_CPP_MIN_LOG_LEVEL": "0"}))
    assert len(err.splitlines()) == 4


def test_horovod_ranks_find_each_other_through_the_rendezvous(run):
    pytest.importorskip("horovod", reason="Horovod is not installed: run `dtk install-horovod`")
    code = (
        "import os, urllib.request as u\n"
        "e = os.environ; r = int(e['HOROVOD_RANK'])\n"
        "port = e['HOROVOD_GLOO_RENDEZVOUS_PORT']\n"
        "at = f\"http://{e['HOROVOD_GLOO_RENDEZVOUS_ADDR']}:{port}/global/{r}\"\n"
        "u.urlopen(u.Request(at, data=b'x%d' % r, method='PUT'))\n"
        "print(u.urlopen(at).read().decode(), e['HOROVOD_GLOO_RENDEZVOUS_ADDR'], 'TF_CONFIG' in e)"
    )
    processes = assign([sys.executable, "-c", code], 2, communicator="horovod")
    given, out, err, _ = run(processes)
    assert (given, err) == (0, "")
    assert sorted(out.splitlines()) == ["[0] x0 127.0.0.1 False", "[1] x1 127.0.0.1 False"]


def test_a_hangup_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        while_working = job_options.interruptible(
            lambda: int(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN), "run", []
        )
    finally:
        signal.signal(signal.SIGHUP, before)
    assert while_working


def test_a_process_that_ends_at_once_is_noted():
    """It may be over before the launcher looks."""
    for _ in range(5):
        err = io.StringIO()
        with a_job(assign(["/bin/false"], 1), stdout=err, stderr=err) as job:
            assert job.wait(20) == 1
        assert "rank 0, host localhost, failed first, with exit code 1" in err.getvalue()

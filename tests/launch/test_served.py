"""Jobs with parameter servers: who may go, who is replaced, and what the user sees."""

import io
import sys
import textwrap
import time

import pytest

from dtk.cluster import usage
from dtk.launch import assign, job_processes, supervisor

from support.launched import a_job, until

pytestmark = pytest.mark.command

# The roles are played by plain Python: servants serve until the file "done" appears.
STAGE = """
import json, os, signal, sys, time

config = json.loads(os.environ["TF_CONFIG"])
role, index = config["task"]["type"], config["task"]["index"]

def mark(name):
    with open(os.path.join(sys.argv[1], name), "a") as file:
        file.write("x")

def seen(name):
    path = os.path.join(sys.argv[1], name)
    return os.path.getsize(path) if os.path.exists(path) else 0

def until(name, times=1):
    for _ in range(1200):
        if seen(name) >= times:
            return
        time.sleep(0.02)
    sys.exit(f"waited in vain for {name}")

def die():
    os.kill(os.getpid(), signal.SIGKILL)
"""
SERVE = "until('done')"
ROLES = {"chief": "mark('done')", "worker": SERVE, "ps": SERVE}
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


@pytest.fixture
def play(tmp_path):
    def play(workers=1, servers=1, **roles):
        code = STAGE
        for role, part in {**ROLES, **roles}.items():
            code += f"if role == {role!r}:\n{textwrap.indent(part, '    ')}\n"
        command = [sys.executable, "-c", code, str(tmp_path)]
        return assign(command, workers, ps=servers, evaluator="evaluator" in roles)

    return play


def test_servants_end_by_themselves_after_the_chief(play, run):
    bye = SERVE + "\ntime.sleep(0.5)\nprint('bye')"
    given, out, err, _ = run(play(2, worker=bye, ps=bye), grace=30.0)
    assert (given, err, out.count("bye")) == (0, "", 3)


def test_servants_that_never_end_are_ended_without_a_word(play, run):
    deaf = DEAF + "time.sleep(600)"
    given, _, err, seconds = run(play(worker="time.sleep(600)", ps=deaf), grace=0.5)
    assert (given, err) == (0, "")
    assert seconds < 10


def test_the_chiefs_exit_code_is_the_jobs(play, run):
    given, _, err, _ = run(play(chief="mark('done')\nsys.exit('no more disk')"))
    assert given == 1
    assert err.split("dtk: ")[-1].startswith("rank 0, host localhost, failed first, with exit code")
    assert err.endswith("no more disk\n")


def test_the_evaluator_is_waited_for_and_may_fail(play, run):
    late = "until('done')\ntime.sleep(0.5)\nprint('evaluated')\nsys.exit(5)"
    given, out, err, _ = run(play(evaluator=late), grace=0.1)
    assert (given, out) == (5, "[evaluator 0] evaluated\n")
    assert "evaluator 0, host localhost, failed first" in err


def test_a_killed_evaluator_is_started_again_and_training_goes_on(play, run):
    evaluator = """
if not seen("lost"):
    mark("lost")
    die()
mark("evaluated")
until("done")
"""
    processes = play(chief="until('evaluated')\nmark('done')", evaluator=evaluator)
    given, _, err, _ = run(processes)
    said = "dtk run: evaluator 0 was killed by SIGKILL; starting it again (1 of 3)\n"
    assert (given, err) == (0, said)


def test_training_goes_on_without_an_evaluator_and_the_exit_code_says_so(play, run):
    processes = play(
        chief="until('lost')\ntime.sleep(1.0)\nprint('trained')\nmark('done')",
        evaluator="mark('lost')\ndie()",
    )
    given, out, err, _ = run(processes, max_restarts=0)
    assert (given, out) == (137, "[          0] trained\n")
    first, *_, last = err.strip().splitlines()
    assert first == (
        "dtk run: evaluator 0 was killed by SIGKILL; training goes on without it, and its exit "
        "code will be the job's"
    )
    assert "evaluator 0, host localhost, failed first, by SIGKILL" in last


def test_a_killed_worker_is_started_again_in_its_place(play, run, tmp_path):
    # The child left behind has inherited the port, and would keep it from the successor.
    worker = """
import socket, subprocess
host, port = config["cluster"]["worker"][index].split(":")
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind((host, int(port)))
server.listen()
print(index, "listens", seen("lost"))
if index == 1 and not seen("lost"):
    mark("lost")
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    subprocess.Popen(sleep, pass_fds=[server.fileno()], start_new_session=True)
    die()
mark("served")
until("done")
"""
    processes = play(2, chief="until('served', 2)\nmark('done')", worker=worker)
    given, out, err, _ = run(processes, output_dir=tmp_path / "logs")
    assert given == 0, err
    lost = "dtk run: rank 2 (worker 1) was killed by SIGKILL; starting it again (1 of 3)\n"
    assert err == lost
    assert [line for line in out.splitlines() if line.startswith("[   2]")] == [
        "[   2] 1 listens 0",
        "[   2] 1 listens 1",
    ]
    assert (tmp_path / "logs/rank-2.log").read_text() == "1 listens 0\n1 listens 1\n"


@pytest.mark.parametrize("who", ["worker", "ps"])
def test_a_stopped_worker_is_started_again_and_a_stopped_server_ends_the_job(play, run, who):
    serves = "from dtk.cluster import progress\nprogress.start(serves=True)\n"
    stops = f"if role == {who!r} and not seen('lost'):\n    mark('lost')\n    time.sleep(1.0)\n"
    serves += stops + "    os.kill(os.getpid(), signal.SIGSTOP)\nmark('up')\nuntil('done')"
    chief = "from dtk.cluster import progress\nprogress.start()\n"
    chief += "with progress.inside('work of the workers'): until('up', 2)\nmark('done')"
    processes = play(chief=chief, worker=serves, ps=serves)
    for one in processes:
        one.env["DTK_STALL_TIMEOUT"] = "2"
    given, _, err, _ = run(processes, stall_timeout=2.0)
    if who == "worker":
        lost = "rank 1 (worker 0) has reported nothing for 2 s, and was ended"
        assert (given, err) == (0, f"dtk run: {lost}; starting it again (1 of 3)\n")
    else:
        assert given == 124
        assert "ps 0, host localhost, reported nothing for 2 s, last in service." in err


def test_a_worker_that_is_always_killed_is_done_without(play, run):
    processes = play(
        2,
        chief="until('killed', 3)\ntime.sleep(1.0)\nmark('done')",
        worker="if index == 0:\n    mark('killed')\n    die()\n" + SERVE,
    )
    given, _, err, _ = run(processes, max_restarts=2)
    lost = "dtk run: rank 1 (worker 0) was killed by SIGKILL"
    assert given == 0
    assert err.splitlines() == [
        f"{lost}; starting it again (1 of 2)",
        f"{lost}; starting it again (2 of 2)",
        f"{lost} (2 of 2 restarts used); the job goes on with 1 of 2 workers",
    ]


def test_a_worker_that_cannot_be_started_again_is_done_without(play, run, monkeypatch):
    start = job_processes.start
    began = []

    def once(argv, env, job, cores, **options):
        began.append(job)
        if len(began) > 4:
            raise OSError(12, "Cannot allocate memory")
        return start(argv, env, job, cores, **options)

    monkeypatch.setattr(job_processes, "start", once)
    chief = "until('killed')\ntime.sleep(1.0)\nmark('done')"
    worker = "if index == 0:\n    mark('killed')\n    die()\n" + SERVE
    given, _, err, _ = run(play(2, chief=chief, worker=worker))
    assert given == 0
    assert "rank 1: cannot start" in err
    assert err.endswith("the job goes on with 1 of 2 workers\n")


def test_the_chief_says_what_the_loss_of_a_server_means(play, run, tmp_path):
    processes = play(
        1,
        2,
        chief="until('lost')\ntime.sleep(1.5)\nraise RuntimeError('resume from the checkpoint')",
        ps="if index == 1:\n    print('about to go')\n    mark('lost')\n    die()\n" + SERVE,
    )
    given, _, err, _ = run(processes, output_dir=tmp_path / "logs")
    assert given == 1
    *_, words, last = err.splitlines()
    assert words == "RuntimeError: resume from the checkpoint"
    assert last.startswith("dtk: ps 1, host localhost, failed first, by SIGKILL (exit code 137);")
    assert last.endswith(f"All it wrote is in {tmp_path / 'logs' / 'ps-1.log'}.")
    assert "dtk run: ps 1 ended by SIGKILL (exit code 137); the chief has 30 s" in err


def test_a_chief_without_a_traceback_still_lends_its_exit_code(play, run):
    chief = "until('lost')\ntime.sleep(0.5)\nsys.exit(4)"
    given, _, err, _ = run(play(chief=chief, ps="print('bye')\nmark('lost')\ndie()"))
    assert given == 4
    assert err.splitlines()[-3:-1] == ["dtk: the last output of ps 0:", "bye"]
    assert err.splitlines()[-1].startswith("dtk: ps 0, host localhost, failed first, by SIGKILL")


def test_a_chief_that_does_not_notice_the_loss_is_ended(play, run, monkeypatch):
    monkeypatch.setattr(supervisor, "_FAREWELL", 0.5)
    chief = DEAF + "time.sleep(600)"
    given, _, err, seconds = run(play(chief=chief, ps="raise ValueError('no such layer')"))
    assert given == 1
    assert seconds < 15
    *_, words, last = err.splitlines()
    assert words == "ValueError: no such layer"
    assert last.startswith("dtk: ps 0, host localhost, failed first, with exit code 1 at <string>:")


@pytest.mark.parametrize("when", ["killed", "lost"])
def test_stop_ends_all_while_workers_come_and_go_or_the_chief_is_heard(play, tmp_path, when):
    lost = "until('killed')\nmark('lost')\ndie()"
    processes = play(
        chief=DEAF + "time.sleep(600)",
        worker=DEAF + "mark('killed')\ntime.sleep(0.1)\ndie()",
        ps=DEAF + (lost if when == "lost" else SERVE),
    )
    job = a_job(processes, grace=0.5, max_restarts=1000, stdout=io.StringIO(), stderr=io.StringIO())
    with job:
        until((tmp_path / when).exists)
        time.sleep(0.5)
        began = time.monotonic()
        job.stop()
        assert time.monotonic() - began < 10
    assert job.wait() == 143
    assert job_processes.members(job.job_id) == []


def test_what_tensorflow_says_of_a_lost_task_is_kept_for_the_file(play, run, tmp_path):
    lines = [
        "E0000 00:00:1795.99  9683 context.cc:911] Failed to remove function remotely due to it",
        "Additional GRPC error information from remote target /job:worker/replica:0/task:1 while",
        ":UNKNOWN:Error received from peer  {grpc_status:14}",
        "This could happen if the remote target has been disconnected from the client.",
        "of the script",
    ]
    chief = f"print({chr(10).join(lines)!r}, file=sys.stderr)\nmark('done')"
    given, _, err, _ = run(play(chief=chief), output_dir=tmp_path / "logs")
    assert (given, err) == (0, "[   0] of the script\n")
    assert (tmp_path / "logs" / "rank-0.log").read_text().splitlines() == lines


def test_a_kill_for_want_of_memory_is_told_from_others(play, run, monkeypatch):
    kills = iter([*[7] * 6, 8])  # two looks as each task starts, and one at the end of one
    monkeypatch.setattr(usage, "_memory_kills", lambda file: next(kills))
    waits = "mark('up')\ntime.sleep(600)"
    worker = "until('up', 2)\nmark('lost')\ndie()"  # when kills were counted for all three
    given, _, err, _ = run(play(chief=waits, ps=waits, worker=worker), max_restarts=0)
    assert given == 137
    why = "by SIGKILL, probably by the kernel's out-of-memory killer"
    assert f"was killed {why}; no worker is left" in err
    assert "by SIGKILL (exit code 137), probably by the kernel's out-of-memory killer" in err


def test_the_chief_is_ended_before_what_serves_it(play, tmp_path):
    serve = "signal.signal(signal.SIGTERM, lambda *_: (mark(role), sys.exit(0)))\nmark('up')\n"
    chief = """
def last(*_):
    time.sleep(1.0)
    print("served until the end", not seen("ps") and not seen("worker"), flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, last)
until('up', 2)
mark('go')
time.sleep(600)
"""
    out, err = io.StringIO(), io.StringIO()
    processes = play(chief=chief, worker=serve + "time.sleep(600)", ps=serve + "time.sleep(600)")
    with a_job(processes, grace=10.0, stdout=out, stderr=err):
        until((tmp_path / "go").exists)
    assert out.getvalue() == "[   0] served until the end True\n"

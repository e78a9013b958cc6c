"""A run can be seen: its events, timeline, report, and `dtk top` tell of the same job."""

import json
import os
import re
import signal
import socket
import subprocess
import time
from html.parser import HTMLParser

import pytest
from click.testing import CliRunner

from dtk.cli.main import main
from dtk.launch import events, monitor, report_page
from dtk.launch.events import EventLog, Steps

from support.launched import DTK_RUN, dtk_run, ranks, until

pytestmark = pytest.mark.command

# Rank 1 sleeps after each step, so rank 0 waits for it: in the next step, in a graph. Messages are
# told of an epoch's last step, the fifth: after steps 2, 4 and 8 ranks compare what they have read.
TRAIN = """
import os, time
import dtk, keras, numpy as np
strategy = dtk.strategies.AllReduceStrategy()
class Sleeps(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if strategy.rank == 1: time.sleep(0.2)
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            open(f"there-{strategy.rank}", "w").close()
            while not os.path.exists("seen"): time.sleep(0.05)
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(np.ones((40, 4)), np.ones((40, 1)), batch_size=8, epochs=2, verbose=0, shuffle=False,
    callbacks=[Sleeps(), dtk.callbacks.Checkpoint("ckpt", resume=False)])
"""


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def of(kind, found):
    return [one for one in found if one["kind"] == kind]


class _Page(HTMLParser):
    """The text of a page, and what it would load."""

    def __init__(self, text):
        super().__init__()
        self.text, self.loaded, self.tags = "", [], []
        self.feed(text)

    def handle_data(self, data):
        self.text += data

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loaded += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag):
        while self.tags.pop() != tag:
            pass


@pytest.fixture
def started(tmp_path):
    """`dtk run` in a folder of its own, with all views, and what `dtk top` says meanwhile."""
    jobs = []

    def start(script, *options):
        (tmp_path / "train.py").write_text(script)
        views = ("--events", "e.jsonl", "--timeline", "t.json", "--report", "r.html")
        jobs.append(
            subprocess.Popen(
                [*DTK_RUN, "-n", "2", "--save-grace", "1", *views, *options, "train.py"],
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": os.getcwd(), "XDG_RUNTIME_DIR": str(tmp_path)},
            )
        )
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill()
        job.communicate()


def whole(folder):
    """The views of a job that has ended, each read to its end."""
    drawn = (folder / "r.html").read_text()
    page = _Page(drawn)
    assert page.tags == [] and page.loaded == []
    for chart in re.findall("<svg.*?</svg>", drawn):
        for anchor in ("end", "middle"):  # of each axis
            labels = re.findall(rf'text-anchor="{anchor}">([^<]+)</text>', chart)
            assert len(labels) == len(set(labels)) > 0, labels
    trace = json.loads((folder / "t.json").read_text())["traceEvents"]
    assert all(one["pid"] > 0 for one in trace)
    assert all(one["tid"] > 0 for one in trace if one["ph"] != "C")
    names = {one["args"]["name"]: one["pid"] for one in trace if one["name"] == "process_name"}
    of_rank = {pid: int(name[5:]) for name, pid in names.items() if name.startswith("rank ")}
    trace = [{**one, "pid": of_rank.get(one["pid"], one["pid"])} for one in trace]
    return lines(folder / "e.jsonl"), trace, page.text


SINGLE = """
import time
import dtk, keras, numpy as np
strategy = dtk.auto_strategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
for _ in range(6):
    model.train_on_batch(np.ones((8, 3)), np.ones((8, 1)))
    time.sleep(0.3)  # so that steps are told of between them
"""


def test_single_batches_are_told_of(started, tmp_path):
    """They belong to no data of `fit`, whose rows were counted."""
    out, err = (job := started(SINGLE)).communicate(timeout=90)
    assert job.returncode == 0, out + err
    steps = of("steps", whole(tmp_path)[0])
    assert steps
    for one in steps:
        assert one["samples"] == 8 * (one["last"] - one["first"] + 1)


def test_every_view_names_the_rank_that_others_wait_for(started, tmp_path, monkeypatch):
    job = started(TRAIN)
    until(lambda: all((tmp_path / f"there-{rank}").exists() for rank in range(2)), 90)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    dead = tmp_path / "dtk" / "1-dead.sock"
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(str(dead))
    top = CliRunner().invoke(main, ["top", str(job.pid)])
    assert "rank 1 is the slowest" in top.output and top.exit_code == 0
    shown = r"^0 .* 2 +10 +\d+ +(\d+)% +\d+ MB .*(?:after|in) (?:train step|collective)"
    row = re.search(shown, top.output, re.M)
    assert row and int(row[1]) > 20, top.output
    assert not dead.exists() and (tmp_path / "dtk").stat().st_mode & 0o77 == 0
    (tmp_path / "seen").touch()
    out, err = job.communicate(timeout=60)
    assert job.returncode == 0, out + err
    found, trace, page = whole(tmp_path)
    assert CliRunner().invoke(main, ["top", str(job.pid)]).exit_code == 1

    waited = [sum(one["seconds"][rank] for one in of("waiting", found)[1:]) for rank in "01"]
    assert waited[0] > max(0.6, 2 * waited[1])
    assert 1 in {one["slowest"] for one in of("waiting", found)}
    for rank in range(2):
        steps = [one for one in of("steps", found) if one["rank"] == rank]
        assert [one["first"] for one in steps][1:] == [one["last"] + 1 for one in steps][:-1]
        assert steps[-1]["last"] == 10 and sum(one["samples"] for one in steps) == 80
        assert all(one["bytes"] > 20 and one["memory"] > 1e8 for one in steps)
        took = [ms for one in steps for ms in one["took"]]
        assert sum(took) / 1000 == pytest.approx(sum(one["seconds"] for one in steps), abs=0.01)
    assert [one["epoch"] for one in of("epoch", found)] == [1, 2]
    assert "loss" in of("epoch", found)[0]["metrics"]
    assert "ckpt" in of("save", found)[0]["path"]
    assert (found[0]["kind"], found[-1]["kind"], found[-1]["code"]) == ("job start", "job end", 0)
    assert "keras" in found[0]["versions"] and found[0]["settings"]["workers"] == 2

    bars = [one for one in trace if one["ph"] == "X" and one["name"].startswith("step ")]
    assert sorted((one["pid"], int(one["name"][5:])) for one in bars) == [
        (rank, step) for rank in range(2) for step in range(1, 11)
    ]
    # Some steps begin together: ranks have compared something in between.
    begun = {(one["pid"], int(one["name"][5:])): one["ts"] for one in bars}
    late = [begun[1, step] - begun[0, step] for step in range(2, 11)]
    assert max(late) > 100_000
    shares = [
        sum(one["args"]["value"] for one in trace if one["pid"] == rank and "coll" in one["name"])
        for rank in range(2)
    ]
    assert shares[0] > 2 * shares[1]
    # Rank 0 waits inside of its messages, and they lie in the step that they belong to.
    sent = {one["id"]: one for one in trace if one["ph"] == "b"}
    over = {one["id"]: one["ts"] for one in trace if one["ph"] == "e"}
    late = {i for i, one in sent.items() if one["args"]["step"] > 1}  # ranks trace the first
    long = {sent[i]["pid"] for i in late if over[i] - sent[i]["ts"] > 100_000}
    assert sent.keys() == over.keys() and long == {0}
    assert any(re.fullmatch(r"all-reduce [\d,]+ B", one["name"]) for one in sent.values())
    ends = {(one["pid"], int(one["name"][5:])): one["ts"] + one["dur"] for one in bars}
    for i, one in sent.items():
        place = one["pid"], one["args"]["step"]
        assert begun[place] - 1000 <= one["ts"] and over[i] <= ends[place] + 1000
    assert "Rank 1 was the slowest" in page and "succeeded" in page
    assert re.search(r"\d+% of the time of training is ", page)
    assert err.splitlines()[-1] == (
        f"dtk run: written: events {tmp_path}/e.jsonl; timeline {tmp_path}/t.json, for "
        f"https://ui.perfetto.dev; report {tmp_path}/r.html, for a browser"
    )
    assert int(re.search(r"Efficiency (\d+)%", page)[1]) < 90


ENDLESS = """
import os, sys, time
open("there", "w").close()
if "FAIL" in os.environ and os.environ["DTK_EVENTS"] and '"index": 1' in os.environ["TF_CONFIG"]:
    raise ValueError("boom")
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_job_that_is_ended_has_whole_views(started, tmp_path, number):
    job = started(ENDLESS)
    until(lambda: (tmp_path / "there").exists())
    job.send_signal(number)
    job.communicate(timeout=30)
    found, trace, page = whole(tmp_path)
    assert found[-1]["code"] == job.returncode == 128 + number
    assert f"ended with {128 + number}" in page
    assert "job end" in {one["name"] for one in trace}


def test_a_job_that_fails_is_told_with_its_words_and_restarts(started, tmp_path, monkeypatch):
    monkeypatch.setenv("FAIL", "1")
    job = started(ENDLESS, "--max-restarts", "1", "--stall-timeout", "0", "--timeout-grace", "1")
    out, err = job.communicate(timeout=60)
    found, _, page = whole(tmp_path)
    assert job.returncode == found[-1]["code"] == 1
    failures = of("failure", found)
    assert [(one["attempt"], one["rank"]) for one in failures] == [(0, 1), (1, 1)], out + err
    assert all("ValueError: boom" in one["text"] for one in failures)
    assert [one["number"] for one in of("restart", found)] == [1]
    assert page.count("ValueError: boom") >= 3 and "ended with 1" in page
    assert [one["error"] for one in failures] == ["ValueError"] * 2
    assert re.search(r"rank 1 failed at \S+:\d+: ValueError: boom", page)
    assert err.splitlines()[-1].startswith("dtk run: written: events ")


@pytest.mark.parametrize("option", ["--events", "--timeline", "--report"])
def test_a_file_that_cannot_be_written_is_refused(option, tmp_path):
    (tmp_path / "train.py").write_text("")
    gone = str(tmp_path / "gone" / "file")
    done = CliRunner().invoke(main, ["run", "-n", "1", option, gone, str(tmp_path / "train.py")])
    assert done.exit_code == 2
    assert f"{option} {gone}: there is no directory {tmp_path / 'gone'}" in done.stderr


def test_a_file_of_two_options_is_refused(tmp_path):
    """The report took the place of the events, those of jobs before included."""
    (tmp_path / "train.py").write_text("")
    file, same = str(tmp_path / "all"), str(tmp_path / "." / "all")
    options = ["--events", file, "--report", same]
    done = CliRunner().invoke(main, ["run", "-n", "1", *options, str(tmp_path / "train.py")])
    assert done.exit_code == 2
    assert f"--report {file} is the file of --events already" in done.stderr


def test_a_fault_in_drawing_is_told_and_events_are_added_to_those_of_earlier_jobs(
    tmp_path, monkeypatch
):
    (tmp_path / "train.py").write_text("raise SystemExit(3)")
    (tmp_path / "events").write_text('{"kind": "earlier"}\n')
    monkeypatch.setattr(report_page, "page", lambda log: 1 / 0)
    told = ["--events", str(tmp_path / "events"), "--report", str(tmp_path / "report")]
    done = CliRunner().invoke(main, ["run", "-n", "1", *told, str(tmp_path / "train.py")])
    assert done.exit_code == 3
    assert "could not be drawn, by a fault of dtk" in done.stderr
    assert "ZeroDivisionError" in done.stderr
    assert [one["kind"] for one in lines(tmp_path / "events")][:2] == ["earlier", "job start"]


def test_a_full_disk_is_told_once_and_the_job_goes_on(tmp_path):
    (tmp_path / "train.py").write_text("print('trained')")
    done = dtk_run("-n", "2", "--events", "/dev/full", "train.py", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.count("trained") == 2
    assert done.stderr.count("No space left on device") == 1


REMOTE = """
import time
import dtk
from dtk.cluster import recording
time.monotonic, clock = lambda: clock() - 500.0, time.monotonic  # of a host that began later
recorder = recording.recorder()
for _ in range(300):
    recorder.begin()
    time.sleep(0.002)
    if recorder.end():
        recorder.tell_steps({"epoch": 1, "bytes": 1, "communicating": 0.0})
"""


def test_another_hosts_clock_is_put_right(run, shell):
    log, began = EventLog(), time.time()
    env = {"DTK_RUN": "1", "DTK_EVENTS": "steps", "PYTHONPATH": os.getcwd()}
    code, _, err, _ = run(ranks(REMOTE, 1, "node", **env), remote_shell=shell, events=log)
    assert code == 0, err
    (steps,) = log.steps[0, 0]  # whole, though it went through a pipe
    assert steps.number == len(steps.begins) == 160
    assert began < steps.since < steps.until < time.time()
    assert 0.32 < steps.elapsed < 5.0


def told(first, last, communicating, since=0.0, begins=(), **facts):
    return {
        "kind": "steps",
        "since": since,
        "until": since + 1.0,
        "first": first,
        "last": last,
        "seconds": 0.5,
        "communicating": communicating,
        "bytes": 1,
        "memory": 1,
        "epoch": 1,
        "begins": list(begins),
        "took": [1.0] * len(begins),
        **facts,
    }


def test_steps_are_compared_where_all_ranks_have_told_of_them():
    log = EventLog()
    log.begin_attempt(0, {}, 2)
    log.hear(0, told(1, 10, 0.5), 0.0)
    log.hear(1, told(1, 5, 0.05), 0.0)  # so rank 0 was in collectives for 0.25 s meanwhile
    log.hear(1, told(6, 15, 0.1), 0.0)
    first, second = log.waiting[0]
    assert (first.first, first.last, first.seconds) == (1, 5, {0: 0.2, 1: 0.0})
    assert (second.first, second.last, second.seconds) == (6, 10, {0: 0.2, 1: 0.0})
    assert log.slowest(0) == 1


def test_without_clocks_in_graphs_the_rank_that_begins_last_is_the_slowest():
    log = EventLog()
    log.begin_attempt(0, {}, 2)
    # Between steps rank 0 waits less in collectives, but it is the last to begin the steps.
    log.hear(0, told(1, 2, 0.1, between=0.1, begins=[300.0, 600.0]), 0.0)
    log.hear(1, told(1, 2, 0.0, between=0.0, since=-7.0, begins=[0.0, 550.0]), 7.0)  # its clock
    assert log.waiting[0][0].seconds == {0: 0.0, 1: 0.35}


def test_what_is_kept_has_a_bound(monkeypatch):
    monkeypatch.setattr(events, "_MOST", 8)
    log = EventLog()
    for step in range(1, 101):
        log.hear(0, told(step, step, 0.1, samples=8), 0.0)
    kept = log.steps[0, 0]
    assert len(kept) <= 8 and sum(one.samples for one in kept) == 800
    assert [one.first for one in kept][1:] == [one.last + 1 for one in kept][:-1]
    assert isinstance(kept[0], Steps)


def test_the_headline_is_the_largest_part_of_the_time_or_why_the_job_failed():
    log = EventLog()
    steps = Steps(0.0, 10.0, 1, 10, 9.0, 1.0, 0.0, 1e6, 1, 0.0, input=6.8)
    log.steps[0, 0] = log.steps[0, 1] = [steps]
    log.record("job end", code=0)
    assert report_page.headline(log).startswith("68% of the time of training is reading input: ")
    raised = {"error": "ZeroDivisionError", "message": "by zero", "file": "a.py", "line": 1}
    for kind, rank, text, facts, said in (
        ("failure", 1, "dtk: x", raised, "rank 1 failed at a.py:1: ZeroDivisionError: by zero"),
        ("failure", 1, "dtk: rank 1, by SIGKILL.\nnext", {}, "rank 1, by SIGKILL."),
        ("stall", None, "dtk: ended.\nrank 1 rests.\nstack", {}, "ended. rank 1 rests."),
    ):
        log.record(kind, rank, text=text, **facts)
        log.record("job end", code=1)
        assert report_page.headline(log) == said


def test_numbers_that_json_lacks_are_null(tmp_path):
    log = EventLog()
    log.write_to(str(tmp_path / "e"), print)
    log.hear(0, told(1, 1, 0.1, loss=float("nan")), 0.0)
    log.close()
    assert lines(tmp_path / "e")[0]["loss"] is None


def test_no_job_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(monitor, "folders", lambda: [tmp_path])
    done = CliRunner().invoke(main, ["top"])
    assert done.exit_code == 1 and "no job of `dtk run` runs here" in done.stderr


def test_messages_of_ranks_fit_into_a_pipe(monkeypatch):
    """What an agent passes on is never torn, however short or long the steps are."""
    from dtk.cluster import recording

    sent = []
    monkeypatch.setattr(
        recording.report_channel, "tell", lambda told, patience: not sent.append(told)
    )
    clock = iter(range(10**9))
    for seconds in (1e-3, 7.123456, 0.11111):
        monkeypatch.setattr(recording.time, "monotonic", lambda s=seconds: next(clock) * s)
        recorder = recording.Recorder(tells_each=True)
        for _ in range(400):
            recorder.begin()
            if recorder.end():
                recorder.tell_steps({"samples": 10**9, "loss": 0.123456789012345})
    recorder._begin, now = 0.0, 1e3 + recording.time.time()
    name = "reduce-scatter 1,234,567,890 B"
    recorder.tell_messages([(name, now + i, now + 2 * i) for i in range(400)])
    assert len(sent) > 100 and len(sent[-1]["event"]["spans"]) > 20
    assert max(len(json.dumps(one)) for one in sent) < 3500

"""TF_CONFIG written is TF_CONFIG read; anything malformed says what it got and what it wanted."""

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtk.cluster import TFConfig, tf_config
from dtk.errors import ClusterError


@st.composite
def configs(draw):
    sizes = {
        "chief": draw(st.integers(0, 1)),
        "worker": draw(st.integers(0, 4)),
        "ps": draw(st.integers(0, 2)),
        "evaluator": draw(st.integers(0, 1)),
    }
    if not sizes["chief"] + sizes["worker"]:
        sizes["worker"] = 1
    ports = iter(range(2000, 3000))
    host = st.sampled_from(["a", "node-1", "10.0.0.1", "[::1]"])
    cluster = {
        role: tuple(f"{draw(host)}:{next(ports)}" for _ in range(n))
        for role, n in sizes.items()
        if n
    }
    role = draw(st.sampled_from(sorted(cluster)))
    return TFConfig(cluster, role, draw(st.integers(0, len(cluster[role]) - 1)))


@given(configs())
def test_round_trip(config):
    assert tf_config.parse(config.dumps()) == config


@given(configs())
def test_every_training_task_has_its_own_rank_and_address(config):
    environments = [
        tf_config.to_environment(TFConfig(config.cluster, role, index))
        for role in ("chief", "worker")
        for index in range(len(config.cluster.get(role, ())))
    ]
    assert [e.rank for e in environments] == list(range(len(environments)))
    places = {(e.hosts[e.rank], e.local_rank) for e in environments}
    assert len(places) == len(environments)
    for e in environments:
        assert e.size == len(environments) == len(e.addresses)
        assert e.local_rank < e.local_size == e.hosts.count(e.hosts[e.rank])
        assert (
            e.addresses[e.rank]
            == config.cluster[e.role][e.rank - (e.role == "worker" and "chief" in config.cluster)]
        )


def test_master_is_the_chief_and_rank_0():
    text = json.dumps(
        {"cluster": {"master": ["a:1"], "worker": ["b:1"]}, "task": {"type": "master", "index": 0}}
    )
    environment = tf_config.read({"TF_CONFIG": text})
    assert (environment.role, environment.rank, environment.size) == ("chief", 0, 2)


@pytest.mark.parametrize("text", ["", " ", "{}", '{"cluster": {}}', '{"task": {"type": "worker"}}'])
def test_no_cluster_is_no_job(text):
    assert tf_config.read({"TF_CONFIG": text}) is None


def test_an_index_written_as_text_is_read():
    cluster = {"worker": ["a:1", "b:1"]}
    text = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": "1"}})
    assert tf_config.parse(text).index == 1


@pytest.mark.parametrize(
    ("script", "code"),
    [("dtk.cluster.detect()", 1), ("sys.modules['keras'] = None", 0)],
    ids=["of a script that asks for its place", "of one that makes no strategy"],
)
def test_only_the_message_is_printed(script, code):
    """A traceback stood before it, of lines that are not wrong."""
    cluster = {"worker": ["a:99999", "b:2222"]}
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, dtk; {script}"],
        capture_output=True,
        text=True,
        env={**os.environ, "TF_CONFIG": json.dumps({"cluster": cluster, "task": task()})},
    )
    assert done.returncode == code
    (told,) = done.stderr.splitlines()
    assert told.startswith("dtk: TF_CONFIG: worker has the address 'a:99999', expected host:port ")


def test_an_evaluator_need_not_be_listed():
    config = TFConfig({"worker": ("a:1",)}, "evaluator", 0)
    assert tf_config.to_environment(config).role == "evaluator"


def task(kind="worker", index=0):
    return {"type": kind, "index": index}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "it is not JSON"),
        ('{"cluster":' + "[" * 100_000, "it is not JSON that can be read: .* recursion"),
        ([], "it is a list, not an object"),
        ({"cluster": ["a:1"]}, '"cluster" is .* not an object'),
        ({"cluster": {"worker": ["a:1"]}}, '"task" is None, expected its "type" and "index"'),
        ({"cluster": {"worker": "a:1"}, "task": task()}, "worker has 'a:1', expected a list"),
        (
            {"cluster": {"worker": ["a"]}, "task": task()},
            "worker has the address 'a', expected host:port",
        ),
        ({"cluster": {"worker": ["a:99999"]}, "task": task()}, "a port of 1 to 65535"),
        ({"cluster": {"worker": ["a:1", "a:1"]}, "task": task()}, "a:1 is given to two tasks"),
        (
            {"cluster": {"worker": ["a:1"]}, "task": task(index=1)},
            "worker 1, but the cluster lists 1",
        ),
        ({"cluster": {"worker": ["a:1"]}, "task": task(index=-1)}, "worker -1"),
        ({"cluster": {"worker": ["a:1"]}, "task": task(index="x")}, "task index is 'x'"),
        ({"cluster": {"worker": ["a:1"]}, "task": task(index=True)}, "task index is True"),
        (
            {"cluster": {"worker": ["a:1"]}, "task": task("gpu")},
            "task type is 'gpu', expected one of",
        ),
        ({"cluster": {"gpu": ["a:1"]}, "task": task("gpu")}, "the role 'gpu', expected one of"),
        ({"cluster": {"ps": ["a:1"]}, "task": task("ps")}, "neither a worker nor a chief"),
        (
            {"cluster": {"chief": ["a:1", "a:2"]}, "task": task("chief")},
            "2 chiefs, expected at most one",
        ),
        (
            {"cluster": {"worker": ["a:1"], "evaluator": ["a:2", "a:3"]}, "task": task()},
            "2 evaluators, expected at most one",
        ),
        (
            {"cluster": {"worker": ["a:1"], "chief": ["a:2"], "master": ["a:3"]}, "task": task()},
            "a chief and a master",
        ),
        ({"cluster": {"worker": {"0": "a:1"}}, "task": task()}, "worker has .* expected a list"),
    ],
)
def test_malformed(config, message):
    text = config if isinstance(config, str) else json.dumps(config)
    with pytest.raises(ClusterError, match=message) as error:
        tf_config.parse(text)
    assert str(error.value).startswith("TF_CONFIG: ")
    assert "expected" in str(error.value)
    assert "unset it" in str(error.value)

"""Slurm's compact lists, and which shells are not a job step."""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtk.cluster import slurm
from dtk.cluster.slurm import expand_nodelist, expand_tasks_per_node
from dtk.errors import ClusterError

pytestmark = pytest.mark.command

STEP = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[1-2]"}


def step(rank, node=0, local=0, tasks="2,1", **more):
    return {
        **STEP,
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": "3",
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURM_NODEID": str(node),
        "SLURM_LOCALID": str(local),
        **more,
    }


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ["node1"]),
        ("node[01-03,7],gpu2", ["node01", "node02", "node03", "node7", "gpu2"]),
        ("node[9-11]", ["node9", "node10", "node11"]),
        ("node[098-101]", ["node098", "node099", "node100", "node101"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("a[1]-ib,b-3.example.org", ["a1-ib", "b-3.example.org"]),
    ],
)
def test_node_lists(text, names):
    assert list(expand_nodelist(text)) == names


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 40), min_size=1)), min_size=1
    )
)
def test_node_lists_written_compactly_expand_to_the_names(groups):
    def compact(numbers):
        parts: list[list[int]] = []
        for number in numbers:
            if parts and number == parts[-1][-1] + 1:
                parts[-1].append(number)
            else:
                parts.append([number])
        return ",".join(f"{p[0]:03}-{p[-1]:03}" if len(p) > 1 else f"{p[0]:03}" for p in parts)

    text = ",".join(f"{prefix}[{compact(numbers)}]" for prefix, numbers in groups)
    assert list(expand_nodelist(text)) == [f"{p}{n:03}" for p, numbers in groups for n in numbers]


@given(st.lists(st.integers(0, 9), min_size=1))
def test_tasks_per_node_run_lengths(counts):
    runs: list[list[int]] = []
    for count in counts:
        if runs and runs[-1][0] == count:
            runs[-1].append(count)
        else:
            runs.append([count])
    text = ",".join(f"{run[0]}(x{len(run)})" if len(run) > 1 else str(run[0]) for run in runs)
    assert list(expand_tasks_per_node(text)) == counts


@pytest.mark.parametrize("text", ["", "n[1-", "n1]", "n[3-1]", "n[a]", "n[]", "n[[1]]"])
def test_broken_lists_are_refused(text):
    with pytest.raises(ClusterError, match=r"node list .*expected"):
        expand_nodelist(text)
    for broken in ("", "2(3)", "2x3", "-1", "2(x3"):
        with pytest.raises(ClusterError, match="tasks per node"):
            expand_tasks_per_node(broken)


def test_every_rank_of_a_step_derives_the_same_meeting():
    places = [slurm.read(step(rank, *where)) for rank, where in enumerate([(0, 0), (0, 1), (1, 0)])]
    assert {place.meeting for place in places} == {f"n1:{slurm.port_base(STEP)}"}
    assert [(e.local_rank, e.local_size) for e in places] == [(0, 2), (1, 2), (0, 1)]


@pytest.mark.parametrize("how", ["cyclic", "plane=2", "block:cyclic"])
def test_how_ranks_are_distributed_does_not_matter(how):
    found = slurm.read(step(1, 1, 0, SLURM_DISTRIBUTION=how))
    assert (found.local_rank, found.local_size) == (0, 1)
    assert found.meeting.startswith("n1:")


def test_where_rank_0_may_be_anywhere_no_address_is_told_rather_than_a_wrong_one():
    assert slurm.read(step(1, 1, 0, SLURM_DISTRIBUTION="arbitrary")).meeting == ""


def test_a_layout_that_cannot_be_is_refused():
    for wrong in (step(1, 1, 1), step(1, 2, 0), step(1, tasks="2,2"), step(1, tasks="2")):
        with pytest.raises(ClusterError, match="do not fit together"):
            slurm.read(wrong)


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
        {**step(0), "SLURM_STEP_ID": "4294967290"},
        {**step(0), "SLURM_STEP_ID": "4294967291"},
    ],
    ids=["sbatch", "salloc", "batch step"],
)
def test_the_shells_of_sbatch_and_salloc_are_not_a_step(environ):
    assert slurm.read(environ) is None


def test_ports_stay_below_the_ephemeral_range_and_jobs_apart():
    bases = [
        slurm.port_base({"SLURM_JOB_ID": str(j), "SLURM_STEP_ID": "0"}) for j in range(500, 650)
    ]
    assert all(12000 <= base <= 32000 - 128 for base in bases)
    distances = [abs(a - b) for i, a in enumerate(bases) for b in bases[:i]]
    assert min(distances) >= 128 - 32
    assert slurm.port_base({**STEP, "DTK_PORT_BASE": "15000"}) == 15000
    with pytest.raises(ClusterError, match="DTK_PORT_BASE=0"):
        slurm.port_base({**STEP, "DTK_PORT_BASE": "0"})


@pytest.mark.parametrize(("launcher", "ended"), [("srun", "--quiet 7.0"), ("mpirun", "")])
def test_a_rank_that_is_stuck_ends_its_own_step_only(tmp_path, launcher, ended):
    """Breaks as a stall of `mpirun` within `srun --pty bash` that ends the user's shell."""
    scancel = tmp_path / "scancel"
    scancel.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/ended\n')
    scancel.chmod(0o755)
    of_mpi = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}
    of_mpi |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    size = "2" if launcher == "srun" else "1"
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    env |= {"SLURM_PROCID": "0", "SLURM_NTASKS": size, "SLURM_STEP_NUM_TASKS": size}
    env |= {"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": size, "SLURM_STEP_NODELIST": "a"}
    env |= {} if launcher == "srun" else of_mpi
    leave = "from dtk.cluster import heartbeats; heartbeats._leave()"
    done = subprocess.run([sys.executable, "-c", leave], env=env, timeout=60, check=False)
    assert done.returncode == 124
    place = tmp_path / "ended"
    assert (place.read_text().strip() if place.exists() else "") == ended

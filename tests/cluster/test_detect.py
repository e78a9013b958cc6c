"""Which launcher wins, and which contradictions are refused instead of training apart."""

import json
import multiprocessing
import os
import subprocess
import sys

import pytest

from dtk.cluster import alone, detect
from dtk.cluster.detect import check_not_taken, note_taken
from dtk.cluster.variables import JOINED
from dtk.errors import ClusterError, CommunicatorError

pytestmark = pytest.mark.command


def numbered(rank, size, ranks, sizes, *others):
    """Variables of a launcher that hold a rank and a size, and "name=value" of others."""
    told = dict.fromkeys(ranks.split(), str(rank)) | dict.fromkeys(sizes.split(), str(size))
    return told | dict(one.split("=") for one in others)


def open_mpi(rank, size):
    ranks = "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_LOCAL_RANK PMIX_RANK"
    return numbered(rank, size, ranks, "OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_SIZE")


def hydra(rank, size):
    local = (f"MPI_LOCALRANKID={rank % 2}", "MPI_LOCALNRANKS=2")
    return numbered(rank, size, "PMI_RANK", "PMI_SIZE", *local)


def horovod(rank, size):
    ranks, sizes = "HOROVOD_RANK HOROVOD_LOCAL_RANK", "HOROVOD_SIZE HOROVOD_LOCAL_SIZE"
    return numbered(rank, size, ranks, sizes, "HOROVOD_HOSTNAME=node1")


def srun(rank, size):
    ids = ("SLURM_JOB_ID=1", "SLURM_STEP_ID=0", "SLURM_NODEID=0", "SLURM_STEP_NODELIST=node1")
    sizes = "SLURM_NTASKS SLURM_STEP_TASKS_PER_NODE"
    return numbered(rank, size, "SLURM_PROCID SLURM_LOCALID", sizes, *ids)


def config(index, workers, role="worker", **others):
    cluster = {"worker": [f"node1:{2000 + i}" for i in range(workers)], **others}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})}


@pytest.mark.parametrize(
    ("environ", "kind", "place"),
    [
        ({}, "single", (0, 1, 0, 1)),
        ({"TF_CONFIG": "{}"}, "single", (0, 1, 0, 1)),
        (open_mpi(1, 3), "mpi", (1, 3, 1, 3)),
        (hydra(3, 4), "mpi", (3, 4, 1, 2)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "mpi", (1, 2, 0, 1)),
        ({"PMIX_RANK": "1", "PMIX_SIZE": "2"}, "mpi", (1, 2, 0, 1)),
        (horovod(1, 2), "horovod", (1, 2, 1, 2)),
        (srun(1, 2), "slurm", (1, 2, 1, 2)),
        (config(1, 2), "tf_config", (1, 2, 1, 2)),
        (
            numbered(1, 2, "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
            "mpi",
            (1, 2, 0, 1),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_launcher_alone(environ, kind, place):
    found = detect(environ)
    assert found.kind == kind and found.reason
    assert (found.rank, found.size, found.local_rank, found.local_size) == place


SALLOC = {"SLURM_STEP_ID": "4294967290", "SLURM_NTASKS": "8", "PMIX_RANK": "0"}


@pytest.mark.parametrize(
    ("environ", "kind"),
    [
        # mpirun starts its daemons with srun, one per node: ranks see the daemon's SLURM_PROCID.
        ({**srun(0, 1), **open_mpi(1, 2)}, "mpi"),
        ({**srun(0, 1), **hydra(1, 2)}, "mpi"),
        # srun that also speaks PMI or PMIx
        ({**srun(1, 2), "PMI_RANK": "1", "PMI_SIZE": "2"}, "slurm"),
        ({**srun(1, 2), "PMIX_RANK": "1"}, "slurm"),
        # The shell of salloc runs alone although it has variables of PMIx.
        ({**srun(0, 1), **SALLOC}, "single"),
        # srun of one task leaves the word to TF_CONFIG.
        ({**srun(0, 1), **config(1, 2)}, "tf_config"),
    ],
)
def test_of_two_launchers_one_counts(environ, kind):
    assert detect(environ).kind == kind


def test_what_dtk_run_set_wins_over_anything_inherited():
    inherited = {**open_mpi(4, 9), **srun(3, 7)}
    ours = {"DTK_RUN": "1", **config(1, 2)}
    found = detect({**inherited, **ours})
    assert (found.kind, found.rank, found.size) == ("tf_config", 1, 2)
    assert found.reason.startswith("started by dtk run")
    found = detect({**inherited, "DTK_RUN": "1", **horovod(1, 2), "DTK_HOSTS": "a,b"})
    assert (found.kind, found.rank, found.hosts) == ("horovod", 1, ("a", "b"))
    with pytest.raises(ClusterError, match="DTK_RUN=1 is set, but neither"):
        detect({"DTK_RUN": "1"})


def test_a_world_of_3_with_a_tf_config_of_2_names_both_and_the_cure():
    with pytest.raises(ClusterError) as error:
        detect({**open_mpi(1, 3), **config(1, 2)})
    said = ("OMPI_COMM_WORLD_SIZE=3", "world of 3", "2 tasks", "unset TF_CONFIG", "mpirun -n 2")
    assert all(part in str(error.value) for part in said)


def test_a_tf_config_that_agrees_adds_addresses_and_roles():
    found = detect({**open_mpi(1, 2), **config(1, 2)})
    assert (found.kind, found.addresses) == ("mpi", ("node1:2000", "node1:2001"))
    assert found.roles == ("worker", "worker")
    assert detect(open_mpi(1, 2)).roles == ()
    assert detect(config(0, 1, chief=["a:1"])).roles == ("chief", "worker")


@pytest.mark.parametrize(
    "environ, told",
    [
        ({}, True),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, False),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, True),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, True),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, False),
        (
            {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1"},
            True,
        ),
    ],
)
def test_whether_the_launcher_tells_which_ranks_share_a_host(environ, told):
    """Breaks as two ranks of a host taking one GPU."""
    assert detect(environ).tells_local_rank is told


def test_parameter_servers_may_be_started_by_any_launcher_of_the_right_size():
    with_ps = config(0, 2, role="ps", ps=["node1:3000"])
    assert detect({**open_mpi(2, 3), **with_ps}).role == "ps"
    with pytest.raises(ClusterError, match="3 tasks, 2 of them training"):
        detect({**open_mpi(1, 2), **with_ps})


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not"),
        ({"PMI_SIZE": "2"}, "PMI_RANK is not"),
        ({"PMI_RANK": "x", "PMI_SIZE": "2"}, "PMI_RANK='x', expected a whole number"),
        ({"PMI_RANK": "2", "PMI_SIZE": "2"}, "expected 0 <= rank < size"),
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "0"}, "expected 0 <= rank < size"),
        ({"TF_CONFIG": "{"}, "TF_CONFIG: it is not JSON"),
        # Else ranks would train apart.
        ({"PMIX_RANK": "1"}, "PMIX_RANK=1 .* nothing tells how many"),
        ({**open_mpi(1, 2), **config(0, 2)}, "which is rank 0"),
    ],
)
def test_malformed_variables_are_named(environ, message):
    with pytest.raises(ClusterError, match=message):
        detect(environ)


def test_mpirun_really_sets_what_is_read(tmp_path):
    import shutil

    if shutil.which("mpirun") is None:
        pytest.skip("Open MPI is not installed (Debian: openmpi-bin)")
    # In one piece: ranks print at the same time.
    script = (
        "import os; from dtk.cluster import detect; e = detect()\n"
        "os.write(1, f'{e.kind} {e.rank} {e.size} {e.local_size}\\n'.encode())"
    )
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable]
    out = subprocess.run([*command, "-c", script], capture_output=True, text=True, timeout=60)
    assert sorted(out.stdout.split("\n")) == ["", "mpi 0 2 2", "mpi 1 2 2"], out.stderr


@pytest.mark.parametrize("module", ["dtk.cluster", "dtk.launch", "dtk.cli.main", "dtk.cli.run"])
def test_nothing_here_imports_tensorflow(module):
    heavy = ("tensorflow", "keras", "horovod")
    code = f"import sys, {module}; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


def _detected(queue):
    from dtk import communicators

    queue.put((detect().reason, communicators.create("mpi").size))


@pytest.mark.full_for("forkserver", why="which is spawned, and forks")
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_what_a_rank_starts_by_multiprocessing_is_no_rank(monkeypatch, method):
    """MPI took it for its parent: the job never ended."""
    monkeypatch.setenv(JOINED, str(os.getpid()))
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert detect().size == 2
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=_detected, args=(queue,))
    child.start()
    reason, size = queue.get(timeout=60)
    child.join()
    assert size == 1 and reason.endswith(f"process {os.getpid()} is the rank")


@pytest.mark.parametrize(
    ("variables", "of_another_job"),
    [
        ({**open_mpi(1, 2), "PMIX_NAMESPACE": "job"}, {"PMIX_NAMESPACE": "a job of its own"}),
        (config(1, 2), {"TF_CONFIG": config(1, 2)["TF_CONFIG"].replace("node1:", "node2:")}),
        (
            {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "99"},
            {"MASTER_PORT": "98"},
        ),
    ],
    ids=["mpirun", "TF_CONFIG", "torchrun"],
)
def test_a_program_that_a_rank_has_started_does_not_take_its_place(
    monkeypatch, variables, of_another_job
):
    """It waited for two minutes; MPI waited in it for ever, or wrote into the rank's memory."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(JOINED, "")  # which is put back
    note_taken(detect())
    check_not_taken(detect())  # of a program that has taken this process over
    monkeypatch.setenv(JOINED, os.environ[JOINED].replace(str(os.getpid()), str(os.getppid())))
    said = f"process {os.getppid()} is this rank already, .* start it with DTK_ALONE=1 .* `dtk run`"
    with pytest.raises(CommunicatorError, match=said):
        check_not_taken(detect())
    with monkeypatch.context() as its:
        its.setenv(JOINED, os.environ[JOINED].replace(str(os.getppid()), "999999999"))
        check_not_taken(detect())  # whose rank has ended
    for name, value in of_another_job.items():
        monkeypatch.setenv(name, value)
    check_not_taken(detect())


def test_an_mpirun_in_a_rank_of_dtk_run_is_refused():
    """Its processes took the rank's place, and MPI saw others than the launcher had started."""
    rank = {**config(1, 2), **open_mpi(1, 2), "DTK_RUN": "1"}
    by_dtk = {"PMIX_NAMESPACE": "dtk-7", "DTK_MPI_SERVER": "dtk-7"}
    assert detect(rank).size == detect(rank | by_dtk).size == 2
    for started in ({"PMIX_NAMESPACE": "prterun-7"}, by_dtk | {"PMI_RANK": "0"}):
        with pytest.raises(ClusterError, match=r"^rank 1: .* mpirun .* program by `dtk run`"):
            detect(rank | started)


def test_a_program_that_a_rank_has_started_to_train_alone():
    rank = {**open_mpi(1, 2), JOINED: "1", "DTK_RUN": "1", **config(1, 2), "DTK_ALONE": "1"}
    assert detect(rank).reason == "DTK_ALONE=1 is set, and process 1 is the rank"
    assert detect(rank | {JOINED: str(os.getpid())}).size == 2


def told(text):
    return dict(one.split("=", 1) for one in text.split())


TORCH = "RANK=3 WORLD_SIZE=4 MASTER_ADDR=a MASTER_PORT=99"
SKY = told("SKYPILOT_NODE_RANK=1 SKYPILOT_NUM_NODES=2")
SKY["SKYPILOT_NODE_IPS"] = "10.0.0.4\n10.0.0.5"


@pytest.mark.parametrize(
    ("environ", "place", "meeting"),
    [
        (told(TORCH), (3, 4, 0, 1), "a:99"),
        (told(f"{TORCH} LOCAL_RANK=1 LOCAL_WORLD_SIZE=2"), (3, 4, 1, 2), "a:99"),
        # torchrun listens at its port itself, and Slurm's task is torchrun.
        (
            told(f"{TORCH} TORCHELASTIC_RUN_ID=1 TORCHELASTIC_USE_AGENT_STORE=True") | srun(0, 2),
            (3, 4, 0, 1),
            "a:100",
        ),
        (srun(0, 1) | told(TORCH), (3, 4, 0, 1), "a:99"),  # srun starts one process
        (told("JOB_COMPLETION_INDEX=2 WORLD_SIZE=3 MASTER_ADDR=a"), (2, 3, 0, 1), "a:29500"),
        (
            told("PET_NODE_RANK=1 PET_NNODES=2 PET_MASTER_ADDR=a PET_NPROC_PER_NODE=auto"),
            (1, 2, 0, 1),
            "a:29500",
        ),
        (SKY, (1, 2, 0, 1), "10.0.0.4:29500"),
        (SKY | srun(0, 1), (1, 2, 0, 1), "10.0.0.4:29500"),  # each node's task trained alone
        (told("FLUX_TASK_RANK=1 FLUX_JOB_SIZE=2 MASTER_ADDR=::1"), (1, 2, 0, 1), "[::1]:29500"),
        (
            told("JSM_NAMESPACE_RANK=1 JSM_NAMESPACE_SIZE=2 MASTER_ADDR=a")
            | told("JSM_NAMESPACE_LOCAL_RANK=1 JSM_NAMESPACE_LOCAL_SIZE=2"),
            (1, 2, 1, 2),
            "a:29500",
        ),
    ],
)
def test_ranks_that_meet_at_one_address(environ, place, meeting):
    found = detect(environ)
    assert (found.rank, found.size, found.local_rank, found.local_size) == place
    assert (found.kind, found.meeting) == ("address", meeting) and meeting in found.reason
    assert detect({**environ, "DTK_ALONE": "1"}).kind != "address"


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ("RANK=1 WORLD_SIZE=4", "RANK=1 and WORLD_SIZE=4 are set, .* but MASTER_ADDR is not"),
        ("WORLD_SIZE=2", "WORLD_SIZE=2 is set, as by torchrun.* but RANK and MASTER_ADDR are not"),
        ("RANK=3 MASTER_ADDR=a", "but WORLD_SIZE is not.* DTK_ALONE=1"),
        ("RANK=0 MASTER_ADDR=a", "but WORLD_SIZE is not"),
        ("JOB_COMPLETION_INDEX=0 MASTER_ADDR=a", "Indexed Job, but WORLD_SIZE is not"),
        ("PET_NNODES=2:4", "torch runtime, but PET_NODE_RANK and PET_MASTER_ADDR are not"),
        (f"{TORCH} RANK=4", "RANK=4 with WORLD_SIZE=4: expected 0 <= rank < size"),
        ("RANK=0 WORLD_SIZE='4' MASTER_ADDR=a", "WORLD_SIZE=.*'4'.*, expected a whole number"),
        (f"{TORCH} MASTER_PORT=65535", "MASTER_PORT='65535', expected a port"),
        ("SKYPILOT_NODE_RANK=0 SKYPILOT_NUM_NODES=2", "SkyPilot, but SKYPILOT_NODE_IPS is not"),
        ("FLUX_TASK_RANK=1 FLUX_JOB_SIZE=2", "Flux, but MASTER_ADDR is not"),
        (
            "PET_NODE_RANK=1 PET_NNODES=2 PET_MASTER_ADDR=a PET_NPROC_PER_NODE=2",
            "start the script with torchrun",
        ),
        ("RAY_RAYLET_PID=7 RAY_JOB_ID=01000000", "RAY_RAYLET_PID is set in workers of Ray"),
        ('TF_CONFIG={"sparseCluster":{"worker":{"1":"a:1"}}}', "it has 'sparseCluster', and no"),
    ],
)
def test_half_a_place_is_refused(environ, said):
    """Each would train alone, or wait for others for ever."""
    with pytest.raises(ClusterError, match=said):
        detect(told(environ))
    assert "TF_CONFIG" in environ or detect({**told(environ), "DTK_ALONE": "1"}).size == 1


def test_a_size_with_the_end_of_a_line_counts():
    """Rank 0 trained alone, and the others waited for it."""
    torch = {**told("RANK=0 MASTER_ADDR=a"), "WORLD_SIZE": "4\r\n"}
    assert detect(torch).size == 4
    with pytest.raises(ClusterError, match="OMPI_COMM_WORLD_RANK=1 .* but RANK=0"):
        detect({**torch, **open_mpi(1, 4)})


def test_an_address_beside_a_launcher():
    half = told("RANK=1 MASTER_ADDR=a")  # such as of a script for torch
    assert detect({**half, **open_mpi(1, 2)}).meeting == "a:29500"
    assert detect({**told("WORLD_SIZE=7"), **open_mpi(1, 2)}).meeting == ""
    with pytest.raises(ClusterError, match="OMPI_COMM_WORLD_RANK=1 .* but RANK=3 and WORLD_SIZE=4"):
        detect({**told(TORCH), **open_mpi(1, 2)})
    with pytest.raises(ClusterError, match="RANK=3 and WORLD_SIZE=4 .* but TF_CONFIG .* rank 1"):
        detect({**told(TORCH), **config(1, 4)})
    assert detect({**told(TORCH), **config(3, 4)}).addresses[3] == "node1:2003"
    assert detect({**told("JOB_COMPLETION_INDEX=0 MASTER_ADDR=a"), **config(0, 4)}).size == 4


@pytest.mark.parametrize(
    "environ",
    [
        *("RANK=0", "RANK=0 WORLD_SIZE=1", "RANK=", "RANK=high", "WORLD_SIZE=1"),
        "RANK=0 WORLD_SIZE= MASTER_ADDR=",
        # torchrun's options, which those that it starts inherit
        "TORCHELASTIC_RUN_ID=1 RANK=0 WORLD_SIZE=1 MASTER_ADDR=a PET_NODE_RANK=0 PET_NNODES=1:4",
    ],
)
def test_numbers_of_one_process_do_not_matter(environ):
    assert detect(dict(one.split("=") for one in environ.split())).kind == "single"


def test_room_in_slurm_for_others_is_told():
    assert "set WORLD_SIZE and MASTER_ADDR" in alone.idle_tasks({"JOB_COMPLETION_INDEX": "0"})
    allocated = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    assert "start with `srun ...`" in alone.idle_tasks(allocated)
    for more in ({"SLURM_STEP_ID": "0"}, {"SLURM_NTASKS": "1"}, {"DTK_ALONE": "1"}):
        assert alone.idle_tasks(allocated | more) is None

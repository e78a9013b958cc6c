"""Each rank sees its own GPU only, before TensorFlow starts. The GPUs here are pretended."""

from __future__ import annotations

import collections
import warnings

import pytest
import tensorflow as tf

from dtk import communicators, placement
from dtk.cluster import Place, detect
from dtk.communicators.local import NullCommunicator, NullTransport
from dtk.strategies import AllReduceStrategy, MirroredStrategy, auto_strategy, devices

pytestmark = pytest.mark.command

GPU = collections.namedtuple("GPU", "name device_type")
TWO = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
RANK_1 = {**TWO, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}


class Reached(Exception):
    """Raised where a test has seen enough."""


class Machine:
    """What `tf.config` says of a host with GPUs, and in which order it was asked."""

    def __init__(self, monkeypatch, gpus, started=False):
        self.physical = [GPU(f"/physical_device:GPU:{i}", "GPU") for i in range(gpus)]
        self.visible, self.started = list(self.physical), started
        self.growth, self.calls = {}, []
        listed = {"list_physical_devices": "physical", "get_visible_devices": "visible"}
        for name, kept in listed.items():
            real = getattr(tf.config, name)
            monkeypatch.setattr(tf.config, name, self._listing(kept, real))
        monkeypatch.setattr(tf.config, "set_visible_devices", self.set_visible_devices)
        monkeypatch.setattr(tf.config.experimental, "set_memory_growth", self.set_memory_growth)
        monkeypatch.setattr(tf.config, "list_logical_devices", self.start("logical devices"))
        for name in ("CUDA_VISIBLE_DEVICES", "TF_CONFIG", "DTK_RUN"):
            monkeypatch.delenv(name, raising=False)
        self._monkeypatch = monkeypatch

    def _listing(self, kept, real):
        def answer(kind=None):
            return list(getattr(self, kept)) if kind == "GPU" else real(kind)

        return answer

    def set_visible_devices(self, gpus, kind):
        assert kind == "GPU"
        if self.started and gpus != self.visible:
            raise RuntimeError("Visible devices cannot be modified after being initialized")
        self.calls.append("visible")
        self.visible = gpus

    def set_memory_growth(self, gpu, growth):
        if self.started and self.growth.get(gpu) != growth:
            raise RuntimeError("Physical devices cannot be modified after being initialized")
        self.calls.append("growth")
        self.growth[gpu] = growth

    def start(self, name):
        """What starts TensorFlow, and ends the test."""

        def starting(*args, **kwargs):
            self.calls.append(name)
            raise Reached

        return starting

    def stop_at_communicator(self):
        self._monkeypatch.setattr(communicators, "create", self.start("communicator"))

    def set(self, **variables):
        for name, value in variables.items():
            self._monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    "local_rank, local_size, gpus, restricted, expected",
    [
        (0, 1, 0, None, None),
        (1, 2, 0, "CUDA_VISIBLE_DEVICES=", None),
        (0, 1, 4, None, 0),
        (3, 4, 4, None, 3),
        (1, 2, 2, "CUDA_VISIBLE_DEVICES=2,3", 1),
        # One for each rank: the launcher has chosen.
        (0, 2, 1, "CUDA_VISIBLE_DEVICES=0", 0),
        (1, 2, 1, "CUDA_VISIBLE_DEVICES=1", 0),
        (3, 4, 1, "tf.config.set_visible_devices", 0),
    ],
)
def test_which_gpu(local_rank, local_size, gpus, restricted, expected):
    names = [f"GPU:{i}" for i in range(gpus)]
    assert devices.choose_gpu(local_rank, local_size, names, restricted) == expected


@pytest.mark.parametrize(
    "gpus, restricted, said",
    [
        (1, None, "it sees 1 (all of this host) for 3 ranks. Start at most 1"),
        (2, "CUDA_VISIBLE_DEVICES=4,5", "it sees 2 (CUDA_VISIBLE_DEVICES=4,5) for 3 ranks"),
    ],
)
def test_more_ranks_than_gpus_are_refused(gpus, restricted, said):
    with pytest.raises(ValueError, match="local rank 2 has no GPU of its own") as raised:
        devices.choose_gpu(2, 3, ["GPU"] * gpus, restricted)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    "told, make, calls",
    [
        (RANK_1, {"memory_growth": True}, ["visible", "growth", "communicator"]),
        (RANK_1, {}, ["visible", "communicator"]),
        # No local rank is told: all ranks of the host would have taken GPU 0.
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, {}, ["communicator"]),
    ],
)
def test_a_rank_hides_other_gpus_before_its_communicator_starts(monkeypatch, told, make, calls):
    """Breaks as every rank starting TensorFlow on, and taking the memory of, every GPU."""
    machine = Machine(monkeypatch, gpus=2)
    machine.stop_at_communicator()
    machine.set(**told)
    with pytest.raises(Reached):
        AllReduceStrategy("horovod", **make)
    assert machine.calls == calls
    assert machine.visible == machine.physical[1 if "visible" in calls else 0 :]
    assert machine.growth == ({machine.physical[1]: True} if make else {})


def test_a_launcher_that_gave_each_rank_one_gpu_is_followed(monkeypatch):
    machine = Machine(monkeypatch, gpus=1)
    machine.set(CUDA_VISIBLE_DEVICES="1")
    assert devices.pin(Place("mpi", 1, 2, local_rank=1, local_size=2)) == "/gpu:0"
    assert machine.visible == machine.physical


def test_a_second_strategy_takes_the_same_gpu_without_a_word(monkeypatch):
    machine = Machine(monkeypatch, gpus=2)
    place = Place("mpi", 1, 2, local_rank=1, local_size=2)
    assert devices.pin(place) == "/gpu:0"
    machine.started = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert devices.pin(place) == "/gpu:0"
    assert machine.visible == machine.physical[1:]


def test_once_tensorflow_has_started_the_rank_keeps_its_gpu_and_says_so(monkeypatch):
    machine = Machine(monkeypatch, gpus=2, started=True)
    place = Place("mpi", 1, 2, local_rank=1, local_size=2)
    with pytest.warns(RuntimeWarning) as said:
        assert devices.pin(place, memory_growth=True) == "/gpu:1"
    first, second = (str(one.message) for one in said)
    assert first.startswith("rank 1: TensorFlow had started before the strategy was made, so this ")
    assert "all 2 GPUs" in first and "make the strategy first" in first
    assert "memory_growth=True has no effect" in second
    assert machine.visible == machine.physical


def test_a_script_that_hid_all_gpus_computes_on_the_cpu(monkeypatch):
    machine = Machine(monkeypatch, gpus=2)
    machine.visible = []
    assert devices.pin(Place("mpi", 1, 2, local_rank=1, local_size=2)) == placement.host()
    assert machine.calls == []


def test_a_world_of_one_hides_nothing(monkeypatch):
    machine = Machine(monkeypatch, gpus=2)
    assert devices.pin(Place("single", 0, 1), memory_growth=False) == "/gpu:0"
    assert machine.visible == machine.physical
    assert machine.growth == dict.fromkeys(machine.physical, False)


@pytest.mark.parametrize("make", [MirroredStrategy, auto_strategy])
def test_mirrored_devices_grow_before_tensorflow_starts(monkeypatch, make):
    machine = Machine(monkeypatch, gpus=2)
    with pytest.raises(Reached):
        make(memory_growth=True)
    assert machine.calls == ["growth", "growth", "logical devices"]


class Two(NullCommunicator):
    """Claims two ranks of one host, which answer as told."""

    name = "two"

    def __init__(self, *answers):
        super().__init__(0, 2)
        self.answers = list(answers)

    def allgather_object(self, value):
        """Return what the ranks were said to answer."""
        return self.answers


class Linked(Two):
    """Links the GPUs of its ranks."""

    def link(self, device):
        """Link them."""
        self.gpu_transport = NullTransport(0, 2)


def test_ranks_that_were_given_the_same_gpu_are_told(monkeypatch):
    machine = Machine(monkeypatch, gpus=1)
    machine.set(CUDA_VISIBLE_DEVICES="0")
    given = []
    world = Two((True, "0"), (True, "0"))
    monkeypatch.setattr(world, "allgather_object", lambda value: given.append(value) or [value] * 2)
    with pytest.warns(RuntimeWarning, match="ranks 0 and 1 on .* CUDA_VISIBLE_DEVICES=0; if that"):
        devices.link(world, "/gpu:0")
    assert given == [(True, "0")]
    with pytest.raises(ValueError, match="rank 0: ranks 0 and 1 .* NCCL takes one rank for each"):
        devices.link(Linked((True, "0"), (True, "0")), "/gpu:0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for names in (("0", "1"), (None, None)):
            devices.link(Linked(*((True, name) for name in names)), "/gpu:0")
        # Slurm numbers the GPUs of each task from 0.
        world = Linked((True, "0"), (True, "0"))
        world.place = detect({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"})
        devices.link(world, "/gpu:0")
        devices.link(Two((False, None), (False, None)), "CPU:0")


def test_gradients_that_go_through_the_host_are_told_with_the_way_around():
    with pytest.warns(RuntimeWarning, match="two sends gradients through host memory .* NCCL"):
        devices.link(Two((True, None), (True, None)), "/gpu:0")
    world = Linked((True, None), (False, None))
    with pytest.warns(RuntimeWarning, match="rank 1 has no GPU, so gradients of all ranks go thr"):
        devices.link(world, "/gpu:0")
    assert world.gpu_transport is None


def test_replicas_of_one_process_sum_where_placement_says(monkeypatch):
    """Else `placement.reducing` would move the sums of ranks only."""
    monkeypatch.setattr(placement, "reducing", lambda device: f"{device}, moved")
    strategy = MirroredStrategy(["CPU:0"])
    with tf.distribute.ReplicaContext(strategy, 0):
        assert strategy.extended.replica_communicator().device.endswith("CPU:0, moved")


def test_a_mirrored_strategy_is_one_of_tensorflow_for_scripts_that_ask():
    """Scripts choose by `isinstance(strategy, tf.distribute.MirroredStrategy)`, which was False."""
    assert issubclass(MirroredStrategy, tf.distribute.MirroredStrategy)

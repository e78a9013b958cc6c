"""A cluster of one machine that plays manifests: a network namespace for each pod, joined by a
bridge, with the names that the headless service would give, and what the kubelet would set.

Each start of a pod has another address, and its name is known to the others a second later. What
starts pods again is `Cluster.play`: the Job controller's rules and JobSet's, as far as the
manifests in examples/kubernetes use them.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "kubernetes"
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
Manifest = dict[str, Any]


def read(name: str) -> list[Manifest]:
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


@dataclasses.dataclass
class Job:
    """A Job, of its own or a JobSet's."""

    name: str
    spec: Manifest
    subdomain: str
    labels: Mapping[str, str]
    limit: int  # how often each of its pods may fail

    @property
    def size(self) -> int:
        return int(self.spec["completions"])

    def action(self, code: int) -> str:
        """What the policy says of a pod that has failed; Count is Kubernetes' default."""
        for rule in self.spec.get("podFailurePolicy", {}).get("rules", ()):
            codes = rule.get("onExitCodes")
            if codes and (code in codes["values"]) == (codes["operator"] == "In"):
                return str(rule["action"])
        return "Count"


def jobs_of(documents: Sequence[Manifest]) -> tuple[list[Job], Manifest | None]:
    """The Jobs of a manifest, and the spec of the JobSet that they are of."""
    by_kind = {one["kind"]: one for one in documents}
    if "Job" in by_kind:
        name, spec = by_kind["Job"]["metadata"]["name"], by_kind["Job"]["spec"]
        labels = {"batch.kubernetes.io/job-name": name}
        subdomain = spec["template"]["spec"]["subdomain"]
        return [Job(name, spec, subdomain, labels, spec["backoffLimitPerIndex"])], None
    if "TrainJob" in by_kind:
        jobset = _of_trainer(by_kind["TrainJob"], by_kind["ClusterTrainingRuntime"])
    else:
        jobset = by_kind["JobSet"]
    name, spec = jobset["metadata"]["name"], jobset["spec"]
    subdomain = spec.get("network", {}).get("subdomain", name)
    jobs = [
        Job(
            f"{name}-{one['name']}-0",
            one["template"]["spec"],
            subdomain,
            {"jobset.sigs.k8s.io/jobset-name": name},
            one["template"]["spec"]["backoffLimit"],
        )
        for one in spec["replicatedJobs"]
    ]
    return jobs, spec


def _of_trainer(train_job: Manifest, runtime: Manifest) -> Manifest:
    """The JobSet that Kubeflow Trainer's torch plugin makes."""
    assert runtime["metadata"]["name"] == train_job["spec"]["runtimeRef"]["name"]
    name, trainer = train_job["metadata"]["name"], train_job["spec"]["trainer"]
    spec = copy.deepcopy(runtime["spec"]["template"]["spec"])
    (node,) = spec["replicatedJobs"]
    label = node["template"]["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"]
    assert (node["name"], label) == ("node", "trainer")
    job = node["template"]["spec"]
    job["completions"] = trainer["numNodes"]
    (container,) = job["template"]["spec"]["containers"]
    assert container["name"] == "node"
    container["command"] = trainer["command"]
    told = {
        "PET_NNODES": trainer["numNodes"],
        "PET_NPROC_PER_NODE": trainer["numProcPerNode"],
        "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
        "PET_MASTER_PORT": 29500,
    }
    container["env"] += [{"name": key, "value": str(value)} for key, value in told.items()]
    rank = {"fieldRef": {"fieldPath": _INDEX}}
    container["env"].append({"name": "PET_NODE_RANK", "valueFrom": rank})
    return {"metadata": train_job["metadata"], "spec": spec}


def variables(
    container: Manifest, index: int, secrets: Mapping[str, Mapping[str, str]]
) -> dict[str, str]:
    """What the kubelet sets."""
    found: dict[str, str] = {}

    def expanded(text: str) -> str:
        """With the variables that stand before it."""
        return re.sub(r"\$\((\w+)\)", lambda match: found.get(match[1], match[0]), text)

    for source in container.get("envFrom", ()):
        found |= secrets[source["secretRef"]["name"]]
    for one in container.get("env", ()):
        source = one.get("valueFrom", {})
        if "fieldRef" in source:
            assert source["fieldRef"]["fieldPath"] == _INDEX
            text = str(index)
        elif "resourceFieldRef" in source:
            kind, name = source["resourceFieldRef"]["resource"].split(".")
            text = str(container["resources"][kind][name])
        else:
            text = expanded(one["value"])
        found[one["name"]] = text
    return {**found, "JOB_COMPLETION_INDEX": str(index)}


@dataclasses.dataclass
class Pod:
    """One start of a pod."""

    job: Job
    index: int
    namespace: str
    address: str
    process: subprocess.Popen[str]
    output: Path
    named: bool = False

    @property
    def host(self) -> str:
        return f"{self.job.name}-{self.index}"

    @property
    def code(self) -> int | None:
        """As the kubelet reports it."""
        code = self.process.poll()
        return code if code is None or code >= 0 else 128 - code

    @property
    def said(self) -> str:
        return self.output.read_text()


class Cluster:
    """Nodes, a network and a volume."""

    def __init__(self, folder: Path, undo: contextlib.ExitStack) -> None:
        self.volume = folder / "volume"
        self.volume.mkdir()
        self.secrets = {"train": {"DTK_JOB_SECRET": "of this job"}}
        self.starts: list[Pod] = []
        self._undo, self._folder = undo, folder
        self._mark = f"dtk{uuid.uuid4().hex[:6]}"
        self._net = f"10.{150 + os.getpid() % 50}.{os.getpid() % 250}"
        self._do(f"ip link add {self._mark}b type bridge", f"ip link del {self._mark}b")
        self._do(f"ip addr add {self._net}.254/24 dev {self._mark}b")
        self._do(f"ip link set {self._mark}b up")

    def _do(self, command: str, cure: str = "") -> None:
        subprocess.run(shlex.split(command), check=True, capture_output=True)
        if cure:
            run = {"check": False, "capture_output": True}
            self._undo.callback(subprocess.run, shlex.split(cure), **run)

    @property
    def running(self) -> list[Pod]:
        return [pod for pod in self.starts if pod.code is None]

    def pod(self, host: str) -> Pod:
        """The newest of that name."""
        return next(pod for pod in reversed(self.starts) if pod.host == host)

    def cut_off(self, pod: Pod) -> None:
        """As a node that loses its network: nothing comes, and nobody is told."""
        self._do(f"ip link set {self._veth(self.starts.index(pod) + 1)} down")

    def _veth(self, number: int) -> str:
        return f"{self._mark}v{number}"

    def start(self, job: Job, index: int, more: Sequence[str]) -> Pod:
        number = len(self.starts) + 1
        namespace, address = f"{self._mark}{number}", f"{self._net}.{number}"
        self._do(f"ip netns add {namespace}", f"ip netns del {namespace}")
        veth = self._veth(number)
        self._do(f"ip link add {veth} type veth peer name eth0 netns {namespace}")
        self._do(f"ip link set {veth} master {self._mark}b up")
        self._do(f"ip -n {namespace} addr add {address}/24 dev eth0")
        for device in ("eth0", "lo"):
            self._do(f"ip -n {namespace} link set {device} up")
        hosts = Path("/etc/netns", namespace, "hosts")
        hosts.parent.mkdir(parents=True)
        self._undo.callback(shutil.rmtree, hosts.parent)
        (container,) = job.spec["template"]["spec"]["containers"]
        mounts = {one["mountPath"]: str(self.volume) for one in container.get("volumeMounts", ())}
        command = [mounts.get(word, word) for word in [*container["command"], *more]]
        host, output = f"{job.name}-{index}", self._folder / f"{number}.txt"
        hosts.write_text(f"127.0.0.1 localhost\n{address} {host}\n")
        enter = ["ip", "netns", "exec", namespace, "unshare", "--uts"]
        with output.open("w") as file:
            process = subprocess.Popen(
                [*enter, "sh", "-c", f'hostname {host}; exec "$@"', "sh", *command],
                cwd=EXAMPLES,
                env={
                    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                    "PYTHONPATH": os.environ["PYTHONPATH"],
                    "HOME": str(self._folder),
                    "PYTHONUNBUFFERED": "1",
                    **variables(container, index, self.secrets),
                },
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self._undo.callback(_end, process)
        self.starts.append(Pod(job, index, namespace, address, process, output))
        return self.starts[-1]

    def publish(self, served: Callable[[Job], bool]) -> None:
        """Let pods know the names of those that run, as DNS does once it has heard of them."""
        known = {pod.host: pod for pod in self.starts}.values()
        lines = [
            f"{pod.address} {pod.host}.{pod.job.subdomain}\n" for pod in known if served(pod.job)
        ]
        for pod in self.running:
            own = f"127.0.0.1 localhost\n{pod.address} {pod.host}\n"
            # In place, as the file is mounted in the pod, and seldom: who reads it meanwhile may
            # find no name in it, and TensorFlow does not look again.
            file, told = Path("/etc/netns", pod.namespace, "hosts"), own + "".join(lines)
            if file.read_text() != told:
                file.write_text(told)

    def play(
        self,
        documents: Sequence[Manifest],
        more: Sequence[str] = (),
        events: Iterator[None] | None = None,
        seconds: float = 500,
    ) -> bool:
        """Apply a manifest, and see it to its end: whether it is complete. `events` are asked for
        one thing after the other, as often as the controllers look."""
        jobs, jobset = jobs_of(documents)
        services = [one["spec"] for one in documents if one["kind"] == "Service"]

        def served(job: Job) -> bool:
            if jobset is not None:
                network = jobset.get("network", {"enableDNSHostnames": True})
                return bool(network["enableDNSHostnames"])
            headless = [one for one in services if one["clusterIP"] == "None"]
            return any(
                one["publishNotReadyAddresses"] and one["selector"].items() <= job.labels.items()
                for one in headless
            )

        pods = [self.start(job, index, more) for job in jobs for index in range(job.size)]
        failed: dict[str, int] = {}
        restarts, deadline = 0, time.monotonic() + seconds
        while True:
            time.sleep(0.2)
            self.publish(served)
            next(events or iter(()), None)
            if time.monotonic() > deadline:
                raise TimeoutError("\n".join(f"{pod.host}: {pod.said}" for pod in pods))
            ended = [pod for pod in pods if pod.code]
            verdicts = [(pod, pod.job.action(pod.code or 0)) for pod in ended]
            if any(action == "FailJob" for _, action in verdicts):
                self._delete(pods)
                return False
            for pod, action in verdicts:
                failed[pod.host] = failed.get(pod.host, 0) + (action == "Count")
                over = failed[pod.host] > pod.job.limit
                if over and (jobset is None or restarts >= jobset["failurePolicy"]["maxRestarts"]):
                    self._delete(pods)
                    return False
                if over:  # the JobSet starts all again
                    restarts += 1
                    failed.clear()
                    self._delete(pods)
                    pods = [self.start(one.job, one.index, more) for one in pods]
                    break
                pods[pods.index(pod)] = self.start(pod.job, pod.index, more)
            targets = (jobset or {}).get("successPolicy", {}).get("targetReplicatedJobs")
            needed = [p for p in pods if not targets or p.job.name.split("-")[-2] in targets]
            if all(pod.code == 0 for pod in needed):
                self._delete(pods)
                return True

    def _delete(self, pods: Sequence[Pod]) -> None:
        for number, patience in ((signal.SIGTERM, 20), (signal.SIGKILL, 20)):
            left = [pod for pod in pods if pod.code is None]
            for pod in left:
                pod.process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                for pod in left:
                    pod.process.wait(patience)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    with contextlib.ExitStack() as undo:
        yield Cluster(folder, undo)

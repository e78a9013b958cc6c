"""TF_CONFIG, TensorFlow's JSON description of a cluster: read and written.

    {"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 1}}

Ranks count the training processes, chief first, then workers. Parameter servers and the evaluator
have none of their own; their `rank` is the index within their role.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import sys
from collections.abc import Iterable, Mapping

from dtk.cluster.place import Place
from dtk.errors import ClusterError

ROLES = ("chief", "worker", "ps", "evaluator")
TRAINING = ("chief", "worker")
_EXAMPLE = (
    '{"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type": "worker", "index": 0}}'
)
_ADDRESS = re.compile(r"(?P<host>\[[^\[\]\s]+\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})", re.ASCII)


@dataclasses.dataclass(frozen=True)
class TFConfig:
    """A cluster and one task in it, checked on construction.

    Args:
        cluster: Role to "host:port" addresses.
        role: "chief", "worker", "ps" or "evaluator".
        index: Index within the role.

    Raises:
        ClusterError: The parts contradict each other.

    >>> TFConfig({"worker": ("a:1", "b:1")}, "worker", 1).rank
    1
    """

    cluster: Mapping[str, tuple[str, ...]]
    role: str
    index: int

    def __post_init__(self) -> None:
        for role, addresses in self.cluster.items():
            if role not in ROLES:
                raise _wrong(
                    f"the cluster has the role {role!r}, expected one of {', '.join(ROLES)}"
                )
            for address in addresses:
                _check_address(role, address)
        for role in ("chief", "evaluator"):
            if len(self.cluster.get(role, ())) > 1:
                raise _wrong(
                    f"the cluster has {len(self.cluster[role])} {role}s, expected at most one"
                )
        if not self.training:
            raise _wrong("the cluster has neither a worker nor a chief")
        every = [address for addresses in self.cluster.values() for address in addresses]
        for address in every:
            if every.count(address) > 1:
                raise _wrong(f"{address} is given to two tasks, expected an address for each")
        self._check_task()

    def _check_task(self) -> None:
        if self.role not in ROLES:
            raise _wrong(f"task type is {self.role!r}, expected one of {', '.join(ROLES)}")
        count = len(self.cluster.get(self.role, ()))
        # TensorFlow's evaluator runs beside the cluster and need not be listed in it.
        count = 1 if self.role == "evaluator" else count
        if not 0 <= self.index < count:
            raise _wrong(
                f"this task is {self.role} {self.index}, but the cluster lists {count} of that role"
            )

    @property
    def training(self) -> tuple[str, ...]:
        """Addresses of the training processes in rank order: the chief, then the workers."""
        return tuple(address for role in TRAINING for address in self.cluster.get(role, ()))

    @property
    def tasks(self) -> int:
        """Number of tasks of any role."""
        return sum(len(addresses) for addresses in self.cluster.values())

    @property
    def rank(self) -> int:
        """Rank among the training processes; the index within its role for any other."""
        chiefs = len(self.cluster.get("chief", ()))
        return self.index + chiefs if self.role == "worker" else self.index

    def dumps(self) -> str:
        """Return the value of TF_CONFIG.

        >>> TFConfig({"worker": ("a:1",)}, "worker", 0).dumps()
        '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}'
        """
        cluster = {role: list(self.cluster[role]) for role in ROLES if self.cluster.get(role)}
        return json.dumps({"cluster": cluster, "task": {"type": self.role, "index": self.index}})


def parse(text: str) -> TFConfig | None:
    """Parse the value of TF_CONFIG.

    >>> parse('{"cluster": {"master": ["a:1"]}, "task": {"type": "master", "index": 0}}').role
    'chief'
    """
    if not text.strip():
        return None
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _wrong(f"it is not JSON that can be read: {error}") from None
    if not isinstance(config, dict):
        raise _wrong(f"it is a {type(config).__name__}, not an object")
    others = [repr(key) for key in config if "cluster" in key.lower() and key != "cluster"]
    if others and "cluster" not in config:
        raise _wrong(f"it has {', '.join(others)}, and no 'cluster' of all tasks")
    cluster = config.get("cluster") or {}
    if not isinstance(cluster, dict):
        raise _wrong(f'"cluster" is {cluster!r}, not an object')
    if not cluster:
        return None
    if "master" in cluster and "chief" in cluster:
        raise _wrong(
            "the cluster has a chief and a master, which are the same role; keep the chief"
        )
    task = config.get("task")
    if not isinstance(task, dict) or "type" not in task or "index" not in task:
        raise _wrong(f'"task" is {task!r}, expected its "type" and "index"')
    return TFConfig(
        {_role(role): _addresses(role, value) for role, value in cluster.items()},
        _role(task["type"]),
        _index(task["index"]),
    )


def read(environ: Mapping[str, str]) -> Place | None:
    """Read TF_CONFIG.

    >>> text = '{"cluster": {"worker": ["a:1", "a:2"]}, "task": {"type": "worker", "index": 1}}'
    >>> read({"TF_CONFIG": text}).local_rank
    1
    """
    config = parse(environ.get("TF_CONFIG", ""))
    return None if config is None else to_environment(config)


def to_environment(config: TFConfig) -> Place:
    """Turn a TF_CONFIG into a place in the job.

    >>> to_environment(TFConfig({"worker": ("a:1", "b:1")}, "worker", 1)).hosts
    ('a', 'b')
    """
    training = config.role in TRAINING
    peers = config.training if training else config.cluster.get(config.role, ())
    hosts = _hosts_of(peers)
    mine = hosts[config.rank] if hosts else ""
    return Place(
        kind="tf_config",
        rank=config.rank,
        size=len(config.training),
        local_rank=hosts[: config.rank].count(mine),
        local_size=max(1, hosts.count(mine)),
        hosts=_hosts_of(config.training),
        addresses=config.training,
        role=config.role,
        reason=f"TF_CONFIG makes this {config.role} {config.index} of a cluster with "
        + ", ".join(
            f"{len(config.cluster[role])} {role}" for role in ROLES if config.cluster.get(role)
        ),
        roles=tuple(role for role in TRAINING for _ in config.cluster.get(role, ())),
    )


def _hosts_of(addresses: Iterable[str]) -> tuple[str, ...]:
    return tuple(address.rpartition(":")[0] for address in addresses)


@functools.cache
def _show_message_alone() -> None:
    """Have an uncaught ClusterError end the process without a traceback.

    The mistake is in the environment, and not in the lines of the script that led to it.
    """
    before = sys.excepthook
    sys.excepthook = lambda kind, error, trace: (
        print(f"dtk: {error}", file=sys.stderr)
        if isinstance(error, ClusterError)
        else before(kind, error, trace)
    )


def _wrong(what: str) -> ClusterError:
    _show_message_alone()
    return ClusterError(f"TF_CONFIG: {what}; expected e.g. {_EXAMPLE}, or unset it")


def _role(name: object) -> str:
    return "chief" if name == "master" else str(name)


def _index(value: object) -> int:
    # Some schedulers write the index as text.
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch(r"[0-9]+", value):
        return int(value)
    raise _wrong(f"task index is {value!r}, expected a whole number")


def _addresses(role: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise _wrong(f'role {role} has {value!r}, expected a list of "host:port"')
    return tuple(value)


def _check_address(role: str, address: str) -> None:
    match = _ADDRESS.fullmatch(address)
    if match is None or not 1 <= int(match["port"]) <= 65535:
        raise _wrong(
            f"{role} has the address {address!r}, expected host:port with a port of 1 to 65535"
        )

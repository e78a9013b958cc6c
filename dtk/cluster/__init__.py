"""Rank, size, hosts and role of this process. No TensorFlow here."""

from dtk.cluster.detect import detect
from dtk.cluster.hostfile import Host, parse_hostfile, parse_hosts, read_hostfile
from dtk.cluster.place import Place
from dtk.cluster.tf_config import TFConfig

__all__ = [
    "Place",
    "Host",
    "TFConfig",
    "detect",
    "parse_hostfile",
    "parse_hosts",
    "read_hostfile",
]

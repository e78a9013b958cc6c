"""Check the hosts of a job before anything starts on them."""

from __future__ import annotations

from dtk.errors import ClusterError
from dtk.launch import agent, machines

# If clocks differ by more seconds, the lines of a job are no longer in order.
_APART = 2.0


class Preflight:
    """Asks hosts for facts that a plan needs, and compares those that must be equal."""

    def __init__(self, remote_shell: str):
        self._remote_shell = remote_shell
        self._facts: dict[str, machines.HostFacts] = {}

    def survey(self, host: str, ports: int) -> machines.HostFacts:
        """Ask a host for free ports, its cores, its interface, versions and clock."""
        self._facts[host] = facts = machines.survey(host, ports, remote_shell=self._remote_shell)
        return facts

    def check(self) -> list[str]:
        """Raise if versions differ between hosts; return warnings about clocks."""
        versions = {host: facts.versions for host, facts in self._facts.items()}
        if any(versions.values()):
            # Hosts without versions are this machine: add its versions.
            versions = {host: known or agent.versions() for host, known in versions.items()}
        for name in ("Python", "dtk", "tensorflow", "keras"):
            found: dict[str, list[str]] = {}
            for host, known in versions.items():
                if name in known:
                    found.setdefault(known[name], []).append(host)
            if len(found) > 1:
                told = ", ".join(
                    f"{version} on {' and '.join(at)}" for version, at in found.items()
                )
                raise ClusterError(
                    f"hosts differ in {name}: {told}; ranks must compute alike: install the same "
                    "everywhere, or share one environment"
                )
        return [
            f"the clock of {host} is {abs(facts.ahead):.0f} s "
            f"{'ahead of' if facts.ahead > 0 else 'behind'} this machine's: times in logs and "
            "files will not agree"
            for host, facts in self._facts.items()
            if abs(facts.ahead) > _APART
        ]

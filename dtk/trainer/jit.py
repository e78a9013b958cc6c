"""XLA and the steps of several replicas do not go together."""

from __future__ import annotations

from dtk.errors import at_rank
from dtk.trainer.contract import Strategy


def refuse_jit(jit_compile: bool | str | None, strategy: Strategy) -> None:
    """Refuse to compile the step of several replicas by XLA.

    Args:
        jit_compile: As given to `compile`.
        strategy: The model's strategy.

    Raises:
        ValueError: It is True, and there are several replicas.
    """
    if jit_compile is True and strategy.num_replicas_in_sync > 1:
        raise ValueError(
            at_rank(
                strategy.rank,
                "jit_compile=True compiles the whole step with XLA, which cannot contain "
                "reductions that run on the host; leave jit_compile at 'auto' (it stays off under "
                "a strategy)",
            )
        )

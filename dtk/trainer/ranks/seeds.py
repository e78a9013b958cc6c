"""Seeds of random layers, such as dropout: different by rank in training, equal after it."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np

from dtk.compat import keras_variables
from dtk.nests import Array
from dtk.trainer.model_state import ModelState

# Spreads rank-specific seeds over the 31 bits a seed may use (2^32 / golden ratio).
_SEED_STEP = 0x9E3779B1


# Seeds.


def spread_seeds(trainer: ModelState) -> None:
    """Give every replica different random masks, reproducibly: seeds derive from rank 0's."""
    _derive_seeds(trainer, fold_seed)


def share_seeds(trainer: ModelState) -> None:
    """Give every replica rank 0's seeds.

    The script may use these layers elsewhere, too, such as in a pipeline, which must give the same
    rows on all ranks.
    """
    _derive_seeds(trainer, lambda state, rank: state)


def _derive_seeds(trainer: ModelState, derive: Callable[[Array, int], Array]) -> None:
    strategy = trainer.strategy
    for state in trainer.seed_states():
        base = keras.ops.convert_to_tensor(state).numpy()
        holders = strategy.world if keras_variables.is_of_all(state) else strategy.communicator
        base = holders.broadcast_object(base)
        strategy.set_per_replica(state, [derive(base, rank) for rank in strategy.local_ranks()])


def fold_seed(state: Array, rank: int) -> Array:
    """Derive the seed state of one rank from rank 0's; rank 0 keeps its own."""
    return np.array([spread_seed(int(state[0]), rank), int(state[1])], state.dtype)


def spread_seed(seed: int, rank: int) -> int:
    """Derive one rank's seed; rank 0 keeps the given one."""
    return (seed + rank * _SEED_STEP) % 2**31 if rank else seed

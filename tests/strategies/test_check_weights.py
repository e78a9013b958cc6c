"""`strategy.check_weights` compares weights and optimizer state over all replicas."""

from __future__ import annotations

import pytest

from strategies import checked


@pytest.mark.parametrize("backend, size", [("local", 1), ("collective", 2), ("mirrored", 2)])
def test_the_first_variable_that_differs_is_named_on_every_rank(world, backend, size):
    mirrored = backend == "mirrored"
    world = world("local" if mirrored else backend, 1 if mirrored else size)
    for rank, told in enumerate(world.run(checked.checked, size if mirrored else 0)):
        # Kernel, bias, the rate and the count of steps; after the first step their momenta too.
        assert (told["before"], told["after"]) == (4, 6)
        assert told["uncompiled"].startswith(f"ValueError: rank {rank}: model 'unknown' was not ")
        if size == 1:
            assert (told["state"], told["weights"], told["shapes"]) == (6, 6, 4)
            continue
        start = f"DisagreementError: rank {rank}: when asked, "
        assert told["state"].startswith(start + "1 of 6 variables of model ")
        assert "the first is 'sgd/" in told["state"] and "momentum" in told["state"]
        assert told["weights"].startswith(start + "2 of 6 variables of model ")
        assert "/only/kernel'" in told["weights"]
        if not mirrored:
            assert "ranks disagree on the variable 0 of model" in told["shapes"]
            assert "(4, 1) float32" in told["shapes"] and "(4, 2) float32" in told["shapes"]

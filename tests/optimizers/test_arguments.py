"""Numbers that no optimizer can learn by are refused when it is made."""

import math

import pytest

from dtk.optimizers import LAMB, LARS, RMSpropWarmup

NEVER = [math.nan, math.inf, -1.0, "0.1", True]
NUMBERS = {
    LARS: ["learning_rate", "momentum", "trust_coefficient", "weight_decay"],
    LAMB: ["learning_rate", "beta_1", "beta_2", "epsilon", "weight_decay"],
    RMSpropWarmup: [
        *("learning_rate", "steps_per_epoch", "period", "rmsprop_rate"),
        *("momentum", "rho", "epsilon"),
    ],
}


BELOW_ONE = ("momentum", "beta_1", "beta_2", "rho")
ABOVE_ZERO = ("trust_coefficient", "epsilon", "steps_per_epoch", "period", "rmsprop_rate")


@pytest.mark.parametrize(
    "made, name", [(made, name) for made, names in NUMBERS.items() for name in names]
)
def test_what_is_no_number_in_range_is_refused(made, name):
    arguments = {"learning_rate": 0.1}
    if made is RMSpropWarmup:
        arguments["steps_per_epoch"] = 10
    made(**arguments)
    wrong = [*NEVER, *([1.0] if name in BELOW_ONE else []), *([0.0] if name in ABOVE_ZERO else [])]
    for value in wrong:
        with pytest.raises(ValueError, match=f"^{name}={value!r}; expected "):
            made(**{**arguments, name: value})

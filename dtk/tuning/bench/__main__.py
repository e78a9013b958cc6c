"""What `dtk bench` starts on every worker: `python -m dtk.tuning.bench SETTING`."""

from __future__ import annotations

import sys

from dtk.strategies import AllReduceStrategy
from dtk.tuning.bench.measure import measure
from dtk.tuning.bench.results import line
from dtk.tuning.bench.setting import Setting


def main() -> None:
    """Measure; rank 0 prints what was found, as it is found."""
    strategy = AllReduceStrategy()
    for record in measure(Setting.loads(sys.argv[1]), strategy):
        if strategy.is_chief:
            print(line(record), flush=True)


if __name__ == "__main__":
    main()

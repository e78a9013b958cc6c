"""What every process runs: it measures rows, and rank 0 says what was found.

A row is a module beside this one; `measure(setting, strategy)` returns the lines of its tables (or
numbers). Every rank calls it with its strategy, which is None in a process by itself.
"""

import importlib
import json
import sys

import dtk
import keras

from jobs import Setting


def main():
    given = json.loads(sys.argv[1])
    strategy = dtk.strategies.AllReduceStrategy() if given["distributed"] else None
    found = {}
    for name in given["rows"]:
        keras.utils.clear_session()
        with dtk.strategies.undistributed():  # for plain Keras, to compare with
            row = importlib.import_module(name)
            found[name] = row.measure(Setting(*given["setting"]), strategy)
    if strategy is None or strategy.is_chief:
        print("RESULT", json.dumps(found), flush=True)


main()

"""The port of published scripts adds dtk's lines where a user would, and nothing else."""

from __future__ import annotations

import ast
import json
import sys
import textwrap

import pytest

from support.world import TESTS

sys.path.insert(0, str(TESTS.parent / "tools"))
import published_port as port  # noqa: E402

pytestmark = pytest.mark.command


def text(script: str) -> str:
    return textwrap.dedent(script).lstrip()


def test_a_scope_stands_around_what_compiles():
    script = text(
        '''
        """A script."""
        import os
        os.environ["KERAS_BACKEND"] = "tensorflow"
        import keras
        import numpy as np
        WORDS = re.compile("a")
        class Own(keras.Model):
            def compile(self, rate):
                super().compile()
        def made():
            model = Own()
            model.compile(
                rate=1,
            )
            return model
        model = made()
        model.fit(np.ones(3), epochs=9)
        '''
    )
    ported, counts = port.for_dtk(port.telling(script, 2))
    assert ported == text(
        '''
        """A script."""
        import os
        os.environ["KERAS_BACKEND"] = "tensorflow"
        import keras
        import numpy as np
        import dtk

        strategy = dtk.auto_strategy()
        WORDS = re.compile("a")
        class Own(keras.Model):
            def compile(self, rate):
                super().compile()
        def made():
            model = Own()
            with strategy.scope():
                model.compile(
                    rate=1,
                )
            return model
        model = made()
        _seen(model.fit(np.ones(3), epochs=_few(9, 2)))
        '''
    )
    assert counts == {"added": 3, "changed": 0, "indented": 3}


def test_several_statements_and_branches_in_any_order():
    """Breaks as lines indented at the places where they stood before others were added."""
    script = text(
        """
        import keras
        if large:
            a.compile("sgd")
        else:
            a.compile("adam")
        b = keras.models.load_model("b") if saved else (lambda: a)()
        """
    )
    ported, counts = port.for_dtk(script)
    ast.parse(ported)
    assert ported.count("with strategy.scope():") == 3
    assert counts["indented"] == 3


def test_a_notebook_is_its_code_without_commands(tmp_path):
    cells = [
        {"cell_type": "markdown", "source": ["# Title"]},
        {"cell_type": "code", "source": ["!pip install keras\n", "import keras\n"]},
        {"cell_type": "code", "source": ["if True:\n", "    %tensorboard\n"]},
    ]
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    assert port.source_of(path) == "pass\nimport keras\n\n\nif True:\n    pass\n"


def test_folders_are_made_by_rank_0():
    """Every rank runs the whole script, and a second `mkdir` of one folder is an error."""
    script = text(
        """
        import os
        import keras
        os.mkdir("data")
        def later():
            os.mkdir("more")
        """
    )
    ported, counts = port.for_dtk(script)
    assert ported == text(
        """
        import os
        import keras
        import dtk

        strategy = dtk.auto_strategy()
        if strategy.is_chief:
            os.mkdir("data")
        strategy.communicator.barrier()
        def later():
            os.mkdir("more")
        """
    )
    assert counts == {"changed": 0, "added": 4, "indented": 0}

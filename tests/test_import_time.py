"""`import dtk` is cheap and `dtk --help` is instant: neither imports TensorFlow."""

import subprocess
import sys

import pytest

import dtk

pytestmark = pytest.mark.command

HEAVY = ("tensorflow", "keras", "numpy", "horovod")


def test_import_dtk_loads_the_standard_library_and_little_of_dtk():
    code = "import sys; known = set(sys.modules); import dtk; print(*set(sys.modules) - known)"
    loaded = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    own = [name for name in loaded if name.partition(".")[0] == "dtk"]
    others = {name.partition(".")[0] for name in loaded} - {"dtk"} - sys.stdlib_module_names
    assert others == set() and len(own) <= 20, (others, own)


def test_a_name_of_a_room_is_told_its_room():
    with pytest.raises(AttributeError, match="'AllReduceStrategy'; it is dtk.strategies.AllReduce"):
        dtk.AllReduceStrategy()
    with pytest.raises(AttributeError, match="'Strategies'$"):
        dtk.Strategies()


def test_help_leaves_tensorflow_out():
    commands = [[], ["migrate"], ["bench"], ["plan"], ["doctor"], ["install-horovod"]]
    code = (
        "import sys; from dtk.cli.main import main\n"
        f"for command in {commands}:\n"
        "    sys.argv = ['dtk', *command, '--help']\n"
        "    try:\n        main()\n"
        "    except SystemExit as end:\n        assert not end.code, end.code\n"
        f"    print([name for name in {HEAVY} if name in sys.modules])"
    )
    out = subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()
    assert sum(line.startswith("Usage: ") for line in out) == out.count("[]") == len(commands)

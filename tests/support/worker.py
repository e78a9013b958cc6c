"""One rank of a test world; see world.py. Started by a launcher, never by hand."""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib
import os
import sys
import traceback
from multiprocessing import connection
from typing import Any


def main() -> None:
    """Run the bodies the parent names until it hangs up."""
    if os.environ["DTK_TEST_COMMUNICATOR"] == "served":
        # Workers and parameter servers stay in there until the chief has gone.
        from support import bodies

        bodies.served()
    from dtk.bench.ranks import NoAnswer
    from dtk.bench.worker import connect
    from dtk.cluster import detect

    from support import world

    rank = detect().rank
    with connect() as line:
        line.send((rank, os.getpid()))
        while (task := _next(line)) is not None:
            world.seed(rank)  # apart: that dtk makes ranks alike is tested
            try:
                line.send(_run(*task))
            except BaseException:
                line.send(NoAnswer(traceback.format_exc()))


def _next(line: connection.Connection) -> Any:
    try:
        return line.recv()
    except EOFError:
        return None


def _run(name: str, args: tuple[Any, ...]) -> Any:
    module_name, _, qualname = name.partition(":")
    target: Any = importlib.import_module(module_name)
    for part in qualname.split("."):
        target = getattr(target, part)
    from support import world

    world.choose_rewriting(name)
    faulthandler.dump_traceback_later(50)  # before a world loses patience, at 60 s and later
    try:
        return target(*args)
    finally:
        faulthandler.cancel_dump_traceback_later()
        keras = sys.modules.get("keras")
        if keras is not None:
            keras.utils.clear_session()
            _forget_seed()
            # Functions that were traced stay, 10,000 objects for a `fit`, plain or not. Looking
            # through those of all earlier tests came to take a fifth of the time.
            gc.freeze()


def _forget_seed() -> None:
    """Seed all ranks alike where the last body has seeded them.

    Ranks that it has left with seeds of their own would be refused a strategy by the next body, if
    that is the first of this world to make one.
    """
    from dtk.compat.tf_replicas import global_seed

    if global_seed() is not None:
        sys.modules["tensorflow"].random.set_seed(0)


@functools.cache
def _few_threads() -> None:
    import tensorflow as tf

    threads = int(os.environ.get("DTK_TEST_THREADS", "1"))
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    if os.environ["DTK_TEST_COMMUNICATOR"] == "local":
        # For mirrored strategies of up to three devices, made before the first op or never.
        (cpu,) = tf.config.list_physical_devices("CPU")
        three = [tf.config.LogicalDeviceConfiguration()] * 3
        tf.config.set_logical_device_configuration(cpu, three)


def _import_for_good() -> None:
    """Import what bodies need, and never again look through it for garbage.

    `clear_session` after every body looks through all there is: 0.19 s on each rank, which is more
    than most bodies take, and 0.01 s without the 300,000 objects that imports leave.
    """
    gc.disable()
    _few_threads()
    importlib.import_module("dtk.strategies")
    if "PRETENDED_GPUS" in os.environ:
        _leave_out_what_only_gpus_can()
    gc.freeze()
    gc.enable()


def _leave_out_what_only_gpus_can() -> None:
    """Keep Keras and TensorFlow from choosing XLA, and convolutions of a GPU's own layout."""
    import tensorflow as tf
    from keras.src.trainers import trainer

    trainer.model_supports_jit = lambda model: False
    tf.config.optimizer.set_experimental_options({"layout_optimizer": False})
    if os.environ["DTK_TEST_COMMUNICATOR"] == "collective":
        from support import bodies

        bodies.strategy()  # takes its GPU before any body starts TensorFlow


if __name__ == "__main__":
    _import_for_good()
    main()

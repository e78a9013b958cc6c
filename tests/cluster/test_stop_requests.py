"""A SIGTERM that the main thread passes on to the one that trains."""

import os
import subprocess
import sys

FORWARDS = """
import ctypes, os, signal, threading, time
from dtk.cluster import stop_requests
def before(*_):
    print("before", flush=True)
    os._exit(7)
signal.signal(signal.SIGTERM, before)
stop_requests.forward_sigterm()
def train():
    with stop_requests.sigterm_kept():
        ctypes.pythonapi.PyOS_setsig(signal.SIGTERM, ctypes.c_void_p(1))  # ignored, as by a library
    assert stop_requests.subscribe(lambda: print("asked", flush=True))
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)
threading.Thread(target=train, daemon=True).start()
while True:
    time.sleep(0.1)
"""


def test_a_thread_is_asked_once_and_then_all_is_as_before():
    """Also where TensorFlow, in C, has put another handler in the place of Python's."""
    done = subprocess.run(
        [sys.executable, "-c", FORWARDS],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "DTK_RUN": ""},
    )
    assert (done.stdout, done.returncode) == ("asked\nbefore\n", 7), done.stderr

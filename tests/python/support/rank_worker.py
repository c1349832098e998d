"""A rank process: runs what the pool sends, until the pool goes away.

Main calls run one after the other on the main thread, where signals and Ctrl-C arrive; side calls
each on a thread of their own, so that a blocked rank can still be asked and aborted.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import queue
import signal
import sys
import threading
from multiprocessing.connection import Connection

import rankside
import torch

own_pid = os.getpid()  # of this rank: calls may fork


def run_call(connection: Connection, lock: threading.Lock, request: tuple) -> None:
    number, _, module, function, args, kwargs = request
    try:
        value = getattr(importlib.import_module(module), function)(*args, **kwargs)
        reply = (number, True, value)
    except BaseException as error:
        if os.getpid() != own_pid:
            raise  # of a forked child: its interpreter ends with it
        reply = (number, False, rankside.describe(error))
    with lock:
        try:
            connection.send(reply)
        except Exception as error:  # the value cannot be pickled
            connection.send((number, False, rankside.describe(error)))


def read_requests(connection: Connection, lock: threading.Lock, main: queue.SimpleQueue) -> None:
    while True:
        try:
            request = connection.recv()
        except (EOFError, OSError):
            os._exit(3)  # the pool is gone: nobody is left to report to
        if request is None:
            main.put(None)
            return
        if request[1] == "main":
            main.put(request)
        else:
            target = threading.Thread(target=run_call, args=(connection, lock, request))
            target.daemon = True
            target.start()


def next_request(main: queue.SimpleQueue) -> tuple | None:
    while True:
        try:
            return main.get()
        except KeyboardInterrupt:
            continue  # arrived after the call that it was meant for


def work(connection: Connection) -> None:
    lock = threading.Lock()
    main: queue.SimpleQueue = queue.SimpleQueue()
    reader = threading.Thread(target=read_requests, args=(connection, lock, main), daemon=True)
    reader.start()
    while (request := next_request(main)) is not None:
        run_call(connection, lock, request)
        if (ending := rankside.kept.get("ending")) is not None:
            raise ending  # nobody catches it: the interpreter ends with it


def be_a_rank(connection: Connection, dump_path: str) -> None:
    global own_pid
    own_pid = os.getpid()
    # Whoever runs the tests in a shell's background has it ignored, which all children inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    dump = open(dump_path, "w")
    faulthandler.register(signal.SIGUSR1, file=dump, all_threads=True)
    torch.set_num_threads(1)
    if "TORCHFT_EXT_TEST_WARM_UP" in os.environ:
        from device_side import accelerator

        accelerator.warm_up()
    work(connection)


if __name__ == "__main__":
    be_a_rank(Connection(int(sys.argv[1])), sys.argv[2])

"""Commands of elastic jobs: python -m torchft_ext.elastic [COMMAND].

Without a command it serves the store at which the processes of elastic jobs meet.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import threading
from datetime import timedelta

import torch.distributed as dist

_COMMANDS = {
    "run": "a training script as a worker of a job",
    "status": "how a job is",
    "overrule": "an operator's word, after the loss of a quorum",
}


def main() -> None:
    """Run the command; without one, serve until SIGINT or SIGTERM."""
    arguments = sys.argv[1:]
    if arguments and arguments[0] in _COMMANDS:
        command = importlib.import_module(f"torchft_ext.elastic._{arguments[0]}_command")
        sys.exit(command.main(arguments[1:]))
    serve(arguments)


def serve(given: list[str]) -> None:
    """Serve a store until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(
        prog="python -m torchft_ext.elastic",
        description="Serve a store for elastic jobs, until interrupted. Jobs go on without it where"
        " a quorum of their members is left; newcomers need it.",
        epilog="Commands, of which COMMAND --help says more: "
        + "; ".join(f"{name}: {what}" for name, what in _COMMANDS.items()),
    )
    parser.add_argument("--host", default="0.0.0.0", help="the address to listen on")
    parser.add_argument("--port", type=int, default=29500, help="0: any that is free")
    arguments = parser.parse_args(given)
    store = dist.TCPStore(
        arguments.host,
        arguments.port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=30),
    )
    print(f"store at port {store.port}; interrupt to end", flush=True)
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    ended.wait()


if __name__ == "__main__":
    main()

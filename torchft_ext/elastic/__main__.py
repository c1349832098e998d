"""Serves the store at which the processes of elastic jobs meet: python -m torchft_ext.elastic."""

from __future__ import annotations

import argparse
import signal
import threading
from datetime import timedelta

import torch.distributed as dist


def main() -> None:
    """Serve until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(
        prog="python -m torchft_ext.elastic",
        description="Serve a store for elastic jobs, until interrupted. Jobs go on without it where"
        " a quorum of their members is left; newcomers need it.",
    )
    parser.add_argument("--host", default="0.0.0.0", help="the address to listen on")
    parser.add_argument("--port", type=int, default=29500, help="0: any that is free")
    arguments = parser.parse_args()
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

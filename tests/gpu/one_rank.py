"""Every collective of the tests, in this one process as a world of one, which ends by itself: what
compute-sanitizer can watch."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parent)]

import folders  # noqa: E402

sys.path += folders.of_python_tests()

import device_side  # noqa: E402
import test_collectives  # noqa: E402
import test_device_aborts  # noqa: E402
import test_device_batches  # noqa: E402
import test_device_collectives  # noqa: E402
from rankside import backend  # noqa: E402


def main() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    device_side.join(f"127.0.0.1:{store.port}/one", 0, 1)
    # Under compute-sanitizer an operation may take long.
    backend().set_timeout(timedelta(seconds=300))
    test_collectives.SIZES, test_collectives.LARGE = (0, 1025), 131_101
    for name in test_device_collectives.TABLE:
        test_device_collectives.run_table(name)
        print("passed:", name, flush=True)
    test_device_collectives.many_in_flight()
    test_device_batches.coalesced()
    test_device_aborts.capture()
    test_device_aborts.replay(2)
    test_device_aborts.abort_with_an_idle_graph()
    device_side.join(f"127.0.0.1:{store.port}/two", 0, 1)
    device_side.check_sum()
    dist.destroy_process_group()
    print("passed: graph, abort, next generation, goodbye", flush=True)


if __name__ == "__main__":
    main()

"""Prints how groups on one host run their collectives in shared memory, by operation and size.

    python -m torchft_ext.plans > plans.txt

What it prints is a table that TORCHFT_EXT_SHARED_MEMORY_PLANS=plans.txt reads, on all members
alike. With that variable set it prints that table, or which line of it cannot be used, and why.
"""

from __future__ import annotations

import argparse
import sys

import torch.distributed  # noqa: F401  its classes are the bases of the native module's

from torchft_ext._C import _shared_plans

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run as a program; see --help.

    Returns:
        The exit status: 0, or 2 where the table cannot be used.
    """
    parser = argparse.ArgumentParser(
        prog="python -m torchft_ext.plans",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args(arguments)
    try:
        table, digest = _shared_plans()
    except ValueError as error:
        print(f"torchft_ext.plans: {error}", file=sys.stderr)
        return 2
    print(f"# stats()['counters']['shared_plans']: {digest}")
    print(table, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What a process begins once it has made a group."""

from __future__ import annotations

from torchft_ext import _interrupts, _metrics_server

__all__ = ["group_made"]


def group_made() -> None:
    """Hear of Ctrl-C in torch's waits, and serve metrics where that is asked for. Idempotent."""
    _interrupts.watch()
    _metrics_server.serve_if_asked()

"""ProcessGroupGloo: torch's gloo that may be aborted, and other backends by the same means."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from ranks import World, values_of
from rankside import OPERATION_LIMIT, failure_of, kept, leave_default_group, seconds, wait_until
from timing import best_of_rounds

from torchft_ext import process_group as pgs

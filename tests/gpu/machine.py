"""What the run is on: prints one line of JSON, and fails where the device is not there."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata

import accelerator
import torch


def output_of(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return f"{command[0]} is not there"
    done = subprocess.run(command, capture_output=True, text=True, timeout=15)
    return (done.stdout or done.stderr).strip()


def cuda() -> dict[str, object]:
    query_modes = (
        "nvidia-smi",
        "--query-gpu=compute_mode,mig.mode.current",
        "--format=csv,noheader",
    )
    query = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    return {
        "gpus": output_of(*query).splitlines(),
        "compute mode, MIG": output_of(*query_modes).splitlines(),
        "capability": capability,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if capability else None,
        "nvcc": output_of("nvcc", "--version").splitlines()[-1],
        "compute-sanitizer": shutil.which("compute-sanitizer"),
    }


def main() -> int:
    found: dict[str, object] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "MiB of /dev/shm": shutil.disk_usage("/dev/shm").total >> 20,
        "setuptools": metadata.version("setuptools"),
    }
    if not accelerator.simulated():
        found.update(cuda())
    print("machine:", json.dumps(found))
    return 0 if accelerator.simulated() or torch.cuda.is_available() else 1


if __name__ == "__main__":
    sys.exit(main())

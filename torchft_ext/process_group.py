"""torchft's process groups, over this package's engines.

    from torchft_ext.process_group import ProcessGroupHost

    group = ProcessGroupHost(timeout=30.0)
    group.configure("10.0.0.1:29500/quorum1", rank=0, world_size=4)
    group.allreduce([gradients]).wait()

Classes and functions have the names of torchft's module `torchft.process_group`, so a program
changes one import. They need no init_process_group().
"""

from torchft_ext._pg_baby import (
    ProcessGroupBaby,
    ProcessGroupBabyGloo,
    ProcessGroupBabyHost,
    ProcessGroupBabyNCCL,
)
from torchft_ext._pg_backend import ProcessGroupBackend, ProcessGroupGloo
from torchft_ext._pg_base import ProcessGroup
from torchft_ext._pg_declared import BackendCapabilities, declare_backend
from torchft_ext._pg_mesh import extend_device_mesh
from torchft_ext._pg_native import ProcessGroupHost, ProcessGroupNCCL
from torchft_ext._pg_store import create_store_client
from torchft_ext._pg_wrappers import (
    ErrorSwallowingProcessGroupWrapper,
    ManagedProcessGroup,
    ProcessGroupDummy,
    ProcessGroupWrapper,
)

__all__ = [
    "BackendCapabilities",
    "ErrorSwallowingProcessGroupWrapper",
    "ManagedProcessGroup",
    "ProcessGroup",
    "ProcessGroupBaby",
    "ProcessGroupBabyGloo",
    "ProcessGroupBabyHost",
    "ProcessGroupBabyNCCL",
    "ProcessGroupBackend",
    "ProcessGroupDummy",
    "ProcessGroupGloo",
    "ProcessGroupHost",
    "ProcessGroupNCCL",
    "ProcessGroupWrapper",
    "create_store_client",
    "declare_backend",
    "extend_device_mesh",
]

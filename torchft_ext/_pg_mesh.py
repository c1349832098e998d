"""A DeviceMesh with a dimension whose group changes its size."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from torchft_ext._pg_base import ProcessGroup


def extend_device_mesh(
    mesh: DeviceMesh, pg: ProcessGroup, name: str = "dp", dim: int = 0
) -> DeviceMesh:
    """Return a mesh with one more dimension, whose group is `pg`.

    The mesh reports size 1 for that dimension, because a mesh cannot change. The group reports how
    many members it has; code that averages, such as FSDP2's hybrid sharding, asks the group. Does
    not block.

    Args:
        mesh: a mesh over the ranks of the default group, with names.
        pg: a registered group: `pg.register(name)`.
        name: the name of the new dimension.
        dim: the index of the new dimension, from 0 to the number of dimensions of `mesh`.

    Raises:
        ValueError: the group is not registered, the mesh has no names, or `name` is one of them.
    """
    names = mesh.mesh_dim_names
    if names is None:
        raise ValueError("extend_device_mesh: mesh: expected one with mesh_dim_names, found none")
    if name in names:
        raise ValueError(f"extend_device_mesh: name: expected a new one, found '{name}' in {names}")
    if pg._registered is None:
        raise ValueError("extend_device_mesh: pg: expected a registered group: pg.register(name)")
    groups = mesh.get_all_groups()
    groups.insert(dim, pg)
    return DeviceMesh.from_group(
        group=groups,
        device_type=mesh.device_type,
        mesh=mesh.mesh.unsqueeze(dim),
        mesh_dim_names=(*names[:dim], name, *names[dim:]),
    )

"""A DeviceMesh with a dimension whose group changes its size."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from torchft_ext._pg_base import ProcessGroup


def extend_device_mesh(
    mesh: DeviceMesh, pg: ProcessGroup, name: str = "dp", dim: int = 0
) -> DeviceMesh:
    """Return a mesh with one dimension more, along which `pg` is the group.

    The mesh says that the dimension has size 1, since a mesh cannot change; the group says how many
    members it has, and what averages (FSDP2's hybrid sharding does) asks the group. Does not block.

    Args:
        mesh: a mesh over the default group's ranks, with names.
        pg: registered: `pg.register(name)`.
        name: of the new dimension.
        dim: where it is put, 0 to the mesh's number of dimensions.

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

"""The processes of one dimension of a mesh."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from tamis.parallel.exchange import Exchange


def exchange_of(mesh: DeviceMesh | Exchange | None, dim: str) -> Exchange:
    """Messages between them; an error if the mesh has no dimension of that name.  None is a process by itself, and an
    `Exchange` is what it is, for those who look at what it has sent."""
    if isinstance(mesh, Exchange):
        return mesh
    if mesh is None:
        return Exchange(None)
    return Exchange(mesh_of(mesh, dim).get_group())


def mesh_of(mesh: DeviceMesh, dim: str) -> DeviceMesh:
    """That dimension alone."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, as init_device_mesh makes it, got {mesh!r}")
    names = mesh.mesh_dim_names
    if names is not None and dim in names:
        return mesh[dim]
    if mesh.ndim == 1 and names is None:
        return mesh
    has = "dimensions without names" if names is None else f"the dimensions {', '.join(names)}"
    raise ValueError(f"the mesh has no dimension {dim!r}: it has {has}")

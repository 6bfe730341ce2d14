"""DeviceMesh and init_device_mesh, as one imports them from torch.distributed.device_mesh."""

from __future__ import annotations

from cydist.api.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["DeviceMesh", "init_device_mesh"]

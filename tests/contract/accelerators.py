"""What we use of vLLM's accelerator platforms: their modules import only on their hardware, so their source is read."""

from __future__ import annotations

from vllm_pd.vllm_compat.internal import Internal

_WHY = "tells how many workers share this host's memory; asked of current_platform, never on the CPU platform"

ACCELERATORS: tuple[Internal, ...] = tuple(
    Internal(name, f"vllm.platforms.{module}", name, ("device_count()", "device_name", "device_type"), _WHY)
    for module, name in (("cuda", "CudaPlatformBase"), ("rocm", "RocmPlatform"), ("xpu", "XPUPlatform"))
)

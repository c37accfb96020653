"""Packaging of vllm-pd.

The four top-level folders are rooms with one purpose each; `package_dir` maps them into the single import
namespace `vllm_pd`, so that nothing generic (a package named `router`, say) lands in site-packages.
"""

from setuptools import setup

ROOMS = {
    "vllm_pd": "vllm_pd",
    "vllm_pd.agent": "vllm_pd/agent",
    "vllm_pd.graph": "vllm_pd/graph",
    "vllm_pd.planner": "vllm_pd/planner",
    "vllm_pd.planner.actuators": "vllm_pd/planner/actuators",
    "vllm_pd.routing": "vllm_pd/routing",
    "vllm_pd.routing.policies": "vllm_pd/routing/policies",
    "vllm_pd.sim": "vllm_pd/sim",
    "vllm_pd.state": "vllm_pd/state",
    "vllm_pd.vllm_compat": "vllm_pd/vllm_compat",
    "vllm_pd.connectors": "connectors",
    "vllm_pd.kv_offload": "kv_offload",
    "vllm_pd.kv_offload.block_io": "kv_offload/block_io",
    "vllm_pd.kv_offload.policies": "kv_offload/policies",
    "vllm_pd.kv_offload.segments": "kv_offload/segments",
    "vllm_pd.router": "router",
}

setup(
    packages=sorted(ROOMS),
    package_dir=ROOMS,
    package_data={"vllm_pd": ["py.typed"]},
)

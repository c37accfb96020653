"""The `pd` KV connector: vLLM's NIXL and offloading connectors composed into one."""

"""vllm-pd: prefill/decode disaggregation, KV-cache offload and KV-aware routing for vLLM, as a plugin."""

__version__ = "0.1.0"

"""Contract tests: what vllm-pd uses of vLLM is there, in the shape it is used (`python -m tests.contract --help`)."""

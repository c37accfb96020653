"""The standalone router: one OpenAI endpoint for a whole cluster. Imports neither vllm nor torch."""

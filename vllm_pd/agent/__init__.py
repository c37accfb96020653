"""The agent: runs inside each vLLM API server and keeps its worker registered in the store."""

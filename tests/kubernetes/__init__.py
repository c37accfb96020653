"""A Kubernetes API server for tests: the part of it that is used, as strict as a real one."""

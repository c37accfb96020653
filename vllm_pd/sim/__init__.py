"""Modelled engines: a trace simulator for sizing a cluster and comparing policies, and a mock worker for tests and load."""

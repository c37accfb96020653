"""Modelled workers: in virtual time, to size clusters and compare policies; behind a real API, for tests and load."""

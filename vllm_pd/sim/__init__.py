"""Modelled workers in virtual time, to size clusters and compare policies, and behind a real API, for tests and load."""

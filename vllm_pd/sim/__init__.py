"""Modelled workers in virtual time, for sizing clusters, and behind a real API, for tests and load."""

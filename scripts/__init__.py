"""What the Makefile runs: environment, models, demo. Not part of the installed package."""

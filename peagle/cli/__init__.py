"""The command line. Light to import: what is heavy comes in when a command runs."""

import peagle.cli.training  # noqa: F401  (its commands become known)
from peagle.cli.app import main

__all__ = ["main"]

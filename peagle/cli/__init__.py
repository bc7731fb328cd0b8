"""The command line. Light to import: what is heavy comes in when a command runs."""

import peagle.cli.measuring
import peagle.cli.training  # noqa: F401
from peagle.cli.app import main

__all__ = ["main"]

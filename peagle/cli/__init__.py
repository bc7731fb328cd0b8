"""The command line. Light to import: what is heavy comes in when a command runs."""

from peagle.cli.app import main

__all__ = ["main"]

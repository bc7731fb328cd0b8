"""The command line. Light to import: a command imports the heavy modules when it runs."""

from collections.abc import Sequence

from peagle.ops import interrupt

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code (`peagle.cli.app.main`); after Ctrl-C it is 130."""
    with interrupt.handled():
        try:
            from peagle.cli import app

            code = app.main(arguments)
        except KeyboardInterrupt:
            return interrupt.EXIT_CODE
        return interrupt.EXIT_CODE if interrupt.pressed() else code

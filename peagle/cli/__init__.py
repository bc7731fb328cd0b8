"""The command line. Light to import: what is heavy comes in when a command runs."""

from collections.abc import Sequence

from peagle.ops import interrupt

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: peagle.cli.app's, or 130 if Ctrl-C was pressed on the way."""
    with interrupt.handled():
        try:
            from peagle.cli import app

            code = app.main(arguments)
        except KeyboardInterrupt:
            return interrupt.EXIT_CODE
        return interrupt.EXIT_CODE if interrupt.asked() else code

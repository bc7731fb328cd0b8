"""The command line. A command imports JAX only when it runs, so that its help is fast."""

from collections.abc import Sequence

from peagle.ops import interrupt

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code (`peagle.cli.app.main`): 130 after Ctrl-C, also during imports.

    arguments: None: those of the process, which ends afterwards.
    """
    with interrupt.handled(until_exit=arguments is None):
        try:
            from peagle.cli import app

            code = app.main(arguments)
        except KeyboardInterrupt:
            return interrupt.EXIT_CODE
        return interrupt.EXIT_CODE if interrupt.pressed() else code

"""The command line. A command imports JAX only when it runs, so that its help is fast."""

from collections.abc import Sequence

from peagle.base import interrupt

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code (`peagle.cli.app.main`).

    After Ctrl-C, SIGTERM or SIGHUP, also during imports: 130, 143 or 129. arguments: None: those of the process, which
    ends afterwards.
    """
    with interrupt.handled(until_exit=arguments is None):
        try:
            from peagle.cli import app

            code = app.main(arguments)
        except KeyboardInterrupt:
            return interrupt.exit_code()
        return interrupt.exit_code() if interrupt.pressed() else code

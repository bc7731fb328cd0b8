"""The error and the warning for bad input."""


class InputError(ValueError):
    """Bad input: a file, a flag, a prompt, a pair that does not fit.

    The message is one line: what was seen, what was expected, what to do. Commands print it and exit with 2.
    field: the field of a request that is wrong, under the name that a client of the server gives it; None: no single
    one.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class InputWarning(UserWarning):
    """Input that works, but probably not as it was meant: a checkpoint that can be read in two ways.

    The message is one line: what was seen, how it was read, what to do. Commands print it on standard error, even if
    they print little else.
    """

"""The error and the warning for bad input."""


class InputError(ValueError):
    """Bad input: a file, a flag, a prompt, a pair that does not fit.

    The message is one line: what was seen, what was expected, what to do. Commands print it and exit with 2.
    """


class InputWarning(UserWarning):
    """Input that works, but probably not as it was meant: a checkpoint that can be read in two ways.

    The message is one line: what was seen, how it was read, what to do. Commands print it on standard error, even if
    they print little else.
    """

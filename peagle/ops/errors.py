"""The one error class for what a person gave us."""


class InputError(ValueError):
    """Something given by the person does not work: a file, a flag, a prompt, a pair that does not fit.

    The message is one line that says what was seen, what was expected and what to do; commands print it and exit
    with 2.
    """

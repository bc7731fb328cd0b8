"""What there is to say of what a person gave us: the one class of errors, and the one of warnings."""


class InputError(ValueError):
    """Something given by the person does not work: a file, a flag, a prompt, a pair that does not fit.

    The message is one line that says what was seen, what was expected and what to do; commands print it and exit
    with 2.
    """


class InputWarning(UserWarning):
    """Something given by the person works, but probably not as it was meant: a checkpoint that can be read in two ways.

    The message is one line that says what was seen, how it was taken and what to do; commands print it on standard
    error, whatever else they leave out.
    """

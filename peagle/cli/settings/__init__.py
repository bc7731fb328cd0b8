"""The options of the commands, one file a command, each option named once: fields of frozen dataclasses, as typed.

None stands for a default that the run chooses. `peagle.cli.options` makes commands of these dataclasses. A nested one
is a group of options that several commands share, or that one workflow reads.
"""

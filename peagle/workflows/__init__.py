"""The work of the commands, without printing: runs, answers of a target, parity."""

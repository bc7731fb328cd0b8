"""Checkpoints to a Pair: find and fetch them, check that target and drafter fit, load them."""

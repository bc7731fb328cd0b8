"""One decoding step on the device: propose, verify, accept, commit. Pure functions."""

"""Pure functions on arrays and their kernels, shared by target and drafter. One op with several forms, one folder."""

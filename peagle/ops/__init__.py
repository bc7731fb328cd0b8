"""Pure functions and value types shared by the target and the drafter. A leaf: imports nothing of ours."""

"""Pure functions and value types shared by target and drafter. Imports no other package of the project."""

"""Drafters that need no weights of their own."""

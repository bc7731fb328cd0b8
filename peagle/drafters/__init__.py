"""Drafters without weights."""

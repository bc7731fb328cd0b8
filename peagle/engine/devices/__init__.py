"""Engines on several devices, in several processes; the engines of a pair."""

"""Engines on several devices, in several processes; whether they fit into the memory."""

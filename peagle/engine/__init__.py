"""Decode many requests at once, with any target and drafter that follow peagle.protocols.

Start reading at engine.py (the loop) and step.py (one step: propose, verify, accept, commit).
"""

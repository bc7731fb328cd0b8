"""Many requests at once, speculatively or plainly. The engine knows a target and a drafter by peagle.protocols alone.

Start reading at engine.py (the loop) and step.py (one step: propose, verify, accept, commit).
"""

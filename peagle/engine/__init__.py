"""Many requests at once, speculatively or plainly: slots, continuous batching, prompts prefilled in chunks.

The engine knows a target and a drafter by its protocols alone. Start reading at engine.py (the loop) and step.py (one
step: propose, verify, accept, commit). `Pair.slots` makes one. The commands still run on peagle.generate, which decodes
a fixed group; they move here next, and it goes.
"""

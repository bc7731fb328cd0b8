"""`-k auto`: how many drafts of which source each slot verifies, and whether the drafter runs.

A step asks three things, all pure functions of arrays; what they remember is `AutoState` (state.py):

    costs.py    how long the parts of a step take: measured, in units of a plain step
    choose.py   whether the drafter runs, and which drafts to verify: those whose expected gain exceeds their cost
    learn.py    what the outcome of a step teaches

Counts, kept while decoding, give each draft's chance to be accepted after the drafts before it: by source (drafter or
lookup drafter), greedy or sampled, position, and bin of the draft's probability. Draft i survives if drafts 0..i are
accepted: its survival is the product of their chances. Texts differ, so each slot's calibration compares how often the
first drafts of a source were right with the counts' prediction, and scales their survival. A draft is counted if the
token at its position becomes known, whether it was verified or not: a step that accepts n drafts counts drafts 0..n of
each source.

Before the drafter runs, its confidence is unknown. So each slot remembers the gain of its recent drafts by position. In
a slot without drafts, gains drift back to the average of all slots, so that drafting is tried again.

To look up and to choose take time, too. So each slot remembers the profit of its recent steps that tried to draft: the
tokens beyond those that plain steps emit in the same time. If it is negative, drafting is paused: so many plain steps
follow that tries lose a small share of the time. A request begins with the profit and the gains of the engine's
requests of its kind, greedy or sampled.

These choices change time alone, never a token (peagle.engine.step.accept).
"""

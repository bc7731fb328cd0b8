"""`-k auto`: how many drafts of which source each slot verifies, and whether the drafter runs.

A step asks three things, all pure functions of arrays; what they remember is `AutoState` (state.py):

    costs.py    how long the parts of a step take: measured, in units of a plain step
    choose.py   whether the drafter runs, and which drafts to verify: those whose expected gain exceeds their cost
    learn.py    what the outcome of a step teaches

A draft's chance to be accepted, after the drafts before it, is its confidence times the
calibration: how often recent drafts of its source (drafter or lookup drafter) at its position were right, over their
confidence. Draft i survives if drafts
0..i are accepted: its survival is the product of their chances. A draft teaches if the token at its position becomes
known, whether it was verified or not: a step that accepts n drafts teaches by drafts 0..n of each source.

Before the drafter runs, its confidence is unknown. So each slot remembers the gain of its recent drafts by position.
Without drafts, gains drift back to the first ones, so that drafting is tried again.

To look up and to choose take time, too. So each slot remembers the profit of its recent steps that tried to draft: the
tokens beyond those that plain steps emit in the same time. If it is negative, drafting is paused: so many plain steps
follow that tries lose a small share of the time.

All of these are running averages, of each slot and, over more steps, of all requests of a kind, greedy or sampled. A
request begins with its kind's. They change time alone, never a token (peagle.engine.step.accept).
"""

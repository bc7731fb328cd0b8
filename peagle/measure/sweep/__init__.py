"""Sweeps: decode prompts by several methods; compute figures, pages and comparisons.

An *arm* is one method of decoding (K, drafter, draft vocabulary), as in a trial. A *setting* is what arms share when
they are compared: prompts, rendering, temperature.

plan         settings times arms, repeats, limits
folder       a run's folder: run.json, prompts.jsonl, raw.jsonl; valid at any moment, so a killed run can be resumed
measure      decodes a plan
figures      from raw lines to figures with intervals: every formula beyond those of peagle.result
concurrency  the same for many requests at once, over the number of slots
compare      two runs, prompt by prompt: is a difference real?
charts       the pictures
page         the pages: Markdown, and one self-contained HTML file
"""

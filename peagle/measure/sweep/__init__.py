"""Sweeps: many prompts decoded in many ways, and the figures, pages and comparisons that follow from them.

plan         what is swept: settings (prompts, rendering, temperature) times arms (K, drafter, draft vocabulary)
folder       a run's folder: run.json, prompts.jsonl, raw.jsonl; whole at any moment, gone on with after any
measure      the decoding itself
figures      from raw lines to figures with intervals: every formula beyond those of peagle.result
concurrency  the same of many requests at once, over the number of slots
compare      two runs, prompt by prompt: is a difference real?
charts       the pictures
page         the pages: Markdown, and one self-contained HTML file
"""

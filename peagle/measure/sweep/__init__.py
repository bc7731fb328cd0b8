"""Sweeps: decode prompts in several ways; compute figures, pages and comparisons.

A *variant* is how requests are decoded: K, drafter, draft vocabulary, window, and how many at once. A *workload* is
what is decoded: prompts, rendering, temperature. Variants are compared within a workload.

plan      workloads times variants, repeats, limits
store     a run's folder: run.json, prompts.jsonl, raw.jsonl; valid at any moment, so a killed run can be resumed
run       decodes a plan
figures   from raw lines to rows of figures with intervals: every formula beyond those of peagle.result
compare   two runs, prompt by prompt: is a difference real?
calibration  acceptance by the drafter's confidence, with which -k auto begins
headline  the sentences of a page
charts    the pictures
page      the pages: Markdown, and one self-contained HTML file
"""

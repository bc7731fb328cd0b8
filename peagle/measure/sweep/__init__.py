"""Sweeps: decode the same requests in several ways; compute figures, pages and comparisons.

A *variant* is how requests are decoded: K, drafter, draft vocabulary, and how many at once. A *workload* is
what is decoded: prompts, rendering, temperature. Variants are compared within a workload.

plan         workloads times variants, repeats, limits
runner       decodes a plan
store        a run's folder, which is valid at any moment, so that a killed run can be resumed
figures      from raw lines to rows of figures with intervals; peagle.answers.result has the formulas of one request
compare      two runs, request by request: is a difference real?
page         sentences, tables and pictures
"""

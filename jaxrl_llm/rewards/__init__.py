"""Rewards: text in, float out.

One grader per file (`gsm8k`, `math`, `format`, `length_penalty`, `custom`), one table of names (`table`), one pool of
killable processes (`pool`, `worker`) and one front (`grader`). No module of this package imports JAX, and importing the
package itself loads nothing: a worker process pays for the functions it runs and for nothing else.

Left out on purpose: reward models (they need devices, so they live with the trainer) and batch-wise functions (one call
sees one sample, so one bad sample can never take its batch along).
"""

"""Results: what predictions are judged by, tables and figures of runs, predictions and exports of trained models.

May import `libml.augment`, `libml.data`, `libml.networks`, `libml.learn`, `libml.config` and `libml.run`; the loop that
trains uses its scores, and knows nothing else of it.
"""

"""Results: what predictions are judged by, tables and figures of runs, predictions and exports of trained models.

May import everything else but the training loop and `libml.experiment`; nothing that trains depends on it but metrics.
"""

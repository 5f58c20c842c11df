"""Labelling: which image a person labels next, what is kept of it, what it buys, and the page where it happens.

May import `libml.data`, `libml.devices`, `libml.augment`, `libml.learn`, `libml.config`, `libml.features`,
`libml.experiment` and `libml.results`. TensorFlow starts with the learner alone.
"""

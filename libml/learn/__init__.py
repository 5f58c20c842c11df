"""Learning: what a method defines, the step that its loss uses, the update, and the functions they are made of.

May import `libml.augment`, `libml.networks` and `libml.config`; knows no dataset by name, no run and no single method.
"""

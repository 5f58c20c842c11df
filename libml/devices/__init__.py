"""Machines: which devices and processes compute a run, what they share, what a machine has, who holds a folder.

May import `libml.config`; knows no dataset, no network and no method.
"""

"""Learning: what a method defines, the step that its loss uses, the update, and the functions they are made of.

May import `libml.augment`, `libml.networks`, `libml.devices` and `libml.config`; knows no dataset by name, no run
and no single method.
"""
from libml.learn.model import ALIGNMENT_LENGTH, AdamModel, Equal, SSLModel
from libml.learn.options import ConsistencyOptions, PreFixMatchOptions, SharedOptions, ThresholdOptions
from libml.learn.step import LossOutput, Step, UnlabeledLoss
from libml.learn.update import Adam, Nesterov

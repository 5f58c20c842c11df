"""Semi-supervised image classification: one module per method."""
from cssl import cli as cli  # first of all: it sets TensorFlow's environment before anything imports TensorFlow

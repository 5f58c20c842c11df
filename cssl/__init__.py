"""Semi-supervised image classification: one module per method."""

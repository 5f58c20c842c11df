"""The layer below the methods: data, augmentation, networks, losses, the training loop."""

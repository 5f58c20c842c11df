"""The layer below the methods, in rooms: augment, data, networks, learn, devices, results, labelling. Each says what it
imports.

At the top stand errors, lazy, randomness and writing, which everything may import; config, what a run is; run, what it
leaves; train, its loop; features, which embeds images once; experiment, which brings all together; models and losses,
names that FixMatch's users know.
"""

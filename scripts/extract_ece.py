"""Writes stats/ece.json of runs, the medians of the calibration error; see extract_accuracy.py, whose twin it is."""
from extract_accuracy import main

from cssl import cli

if __name__ == "__main__":
    cli.guarded(lambda: main("ece"))

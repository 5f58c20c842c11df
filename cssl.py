"""Launcher: `python cssl.py --dataset=cifar10.3@40-1 …` from the repository's root runs CSSL."""
from cssl import cli

if __name__ == "__main__":
    cli.console("cssl")

"""Figures that only benchmarks and the synthetic example draw."""
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from libml.results.plots import COLOURS, panels


def growth(rows: Sequence[Mapping], names: Sequence[str]) -> Figure:
    """Draws seconds per update and peak memory over each of some settings, of measurements that differ in one alone.

    Dotted: as much longer as the setting is larger. Each kind of panel has one scale: what does not grow looks flat.
    """
    shown = [row for row in rows if "step_s" in row]
    figure, axes = panels(2, len(names), 2.6, 2.3)
    for (top, bottom), name in zip(axes.T, names, strict=True):
        lines: dict[tuple, list[Mapping]] = defaultdict(list)
        for row in sorted(shown, key=lambda row: row[name]):
            lines[tuple(row[other] for other in names if other != name)].append(row)
        for same in (same for same in lines.values() if len(same) > 1):
            places, seconds = [row[name] for row in same], [row["step_s"] for row in same]
            top.plot(places, [seconds[0] * place / places[0] for place in places], ":", color="grey", linewidth=1)
            top.plot(places, seconds, "o-", color=COLOURS[0])
            bottom.plot(places, [row["peak_memory_mb"] / 1024 for row in same], "o-", color=COLOURS[0])
            for axis in (top, bottom):
                axis.set_xscale("log")
                axis.set_xticks(places, [f"{place:,}" for place in places], fontsize="x-small", rotation=45)
                axis.minorticks_off()
                axis.grid(alpha=0.3)
        seconds = [row["step_s"] for row in shown]
        top.set(yscale="log", ylim=(min(seconds) / 1.3, max(seconds) * 1.3))
        bottom.set(xlabel=name, ylim=(0, max(row["peak_memory_mb"] for row in shown) / 1000))
    axes[0, 0].set_ylabel("seconds per update")
    axes[1, 0].set_ylabel("peak memory (GB)")
    return figure


def synthetic(grid: np.ndarray, truth: np.ndarray, functions: dict[str, np.ndarray],
              data: Sequence[np.ndarray]) -> Figure:
    """Plots the synthetic example: learned functions [seeds, grid] by method, the truth and the data."""
    labeled, classes, unlabeled = data
    figure, axes = panels(1, 1, 6.5, 4.2)
    axis = axes[0, 0]
    axis.scatter(unlabeled, np.full(len(unlabeled), 0.5), s=6, color=COLOURS[5], label="unlabelled")
    axis.scatter(labeled, classes, marker="x", color=COLOURS[6], label="labelled")
    axis.plot(grid, truth, color=COLOURS[6], linestyle="--", label="truth")
    for colour, (name, lines) in zip((COLOURS[3], COLOURS[2], COLOURS[4], COLOURS[0]), functions.items(), strict=False):
        axis.plot(grid, lines.T, color=colour, alpha=0.35, linewidth=0.7)
        axis.plot(grid, lines.mean(axis=0), color=colour, linewidth=2.5, label=name)
    axis.set(xlabel="x", ylabel="probability of the positive class", ylim=(-0.05, 1.05))
    axis.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure

"""Figures of benchmarks."""
import figures
import numpy as np


def test_growth_has_a_line_per_setting_that_was_varied():
    base = {"batch": 16, "size": 32, "step_s": 0.2, "peak_memory_mb": 1024}
    rows = [base, {**base, "batch": 4, "step_s": 0.05}, {**base, "size": 64, "step_s": 0.8, "peak_memory_mb": 2048},
            {"batch": 64, "size": 32, "error": "not done after 300 s"}]
    (batch, size), (_, memory) = np.reshape(figures.growth(rows, ("batch", "size")).axes, (2, 2))
    assert [line.get_xydata().tolist() for line in batch.lines] == [[[4, 0.05], [16, 0.2]]] * 2  # linear: on the dots
    assert [line.get_ydata().tolist() for line in size.lines] == [[0.2, 0.4], [0.2, 0.8]]
    assert memory.lines[0].get_xydata().tolist() == [[32, 1], [64, 2]]

"""The synthetic example: its limits, and what it shows on a few data sets."""
import numpy as np
import pytest
import synthetic
from helpers import Program, invoke

from libml.errors import UserError


def small(repetitions=3):
    return synthetic.draw(repetitions, seed=0)


def test_data_follow_the_truth():
    x, y, u = synthetic.draw(400, seed=1)
    assert x.shape == y.shape == (400, 25) and u.shape == (400, 500)
    assert x.min() >= 0 and u.max() <= 1
    for low, high in ((0.0, 0.2), (0.4, 0.6), (0.8, 1.0)):
        chosen = (x >= low) & (x < high)
        # 2,000 points: the standard error is at most 0.011
        assert y[chosen].mean() == pytest.approx(synthetic.truth(x[chosen]).mean(), abs=0.04)


@pytest.mark.parametrize("method", ["soft", "credal"])
def test_labels_renewed_before_every_step_have_no_effect(method, monkeypatch):
    monkeypatch.setitem(synthetic.READINGS, "full", (525, 1))
    alone, trained = (synthetic.fit(m, "full", *small(), iterations=5) for m in ("labels alone", method))
    np.testing.assert_allclose(trained, alone, atol=1e-4)  # float32, five steps
    hard = synthetic.fit("hard", "full", *small(), iterations=5)
    assert np.abs(hard - alone).max() > 0.01


@pytest.mark.parametrize("reading", synthetic.READINGS)
def test_networks_train_independently(reading):
    data = small()
    together = synthetic.fit("credal", reading, *data, iterations=2)
    changed = [np.concatenate([array[:1], array[1:][::-1]]) for array in data]
    np.testing.assert_allclose(synthetic.fit("credal", reading, *changed, iterations=2)[0], together[0], atol=1e-4)
    assert together.shape == (3, 201)
    assert np.all((together > 0) & (together < 1))


@pytest.mark.slow
def test_table(tmp_path):
    done = Program(["scripts/lab/synthetic.py", "--reading=terms", "--repetitions=3"], tmp_path)
    assert done.wait() == 0, done.error
    rows = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in done.output.splitlines()
            if line.startswith("| ") and not line.startswith("| -")}
    assert list(rows) == ["labels", *synthetic.METHODS]
    # 100 iterations of 20 steps find the sigmoid; a constant 1/2 is 0.365 away from it.
    assert float(rows["labels alone"][0].split("±")[0]) < 0.25


def test_bad_arguments():
    with pytest.raises(UserError, match="at least 1"):
        invoke(synthetic.main, "--repetitions=-1")

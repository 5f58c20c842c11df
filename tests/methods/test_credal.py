"""What a run stores for its report page: credal sets, how they shrink, and the test images that tell most."""
import json

import numpy as np
import pytest
import tensorflow as tf
from models import align, decided, skew

from cssl.cssl import CSSL
from cssl.fixmatch import FixMatch
from libml.train import FOLLOWED, TEST_SAMPLE


@pytest.mark.parametrize("reference, bound", [("raw", 0.0), ("aligned", 0.3)])
def test_credal_sets(reference, bound):
    model = decided(CSSL, reference=reference, alpha_bound=bound)
    p_model = skew(model)
    q = np.random.RandomState(0).dirichlet(np.full(10, 0.3), 40).astype(np.float32)
    a = align(q.astype(np.float64), p_model)
    found = tf.function(model.credal_sets)(tf.zeros([40, 16, 16, 3]), q)
    np.testing.assert_allclose(found["aligned"], a, rtol=1e-4, atol=1e-6)  # float32 against float64
    np.testing.assert_allclose(found["alpha"], np.clip(1 - a.max(1), bound, 1), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(found["class"], (q if reference == "raw" else a).argmax(1))
    assert (q.argmax(1) != a.argmax(1)).any()


def test_other_methods_have_none():
    assert decided(FixMatch).credal_sets(tf.zeros([2, 16, 16, 3]), np.full((2, 10), 0.1, np.float32)) == {}


def test_what_a_run_stores(program, tmp_path):
    program(CSSL, "--dataset=digits.1@40-1", "--filters=8", "--scales=1", "--batch=8", "--uratio=2", "--augment=d.d.x",
            "--train_steps=8", "--report_kimg=0.03125", f"--train_dir={tmp_path}")
    (log,) = tmp_path.rglob("metrics.jsonl")
    reports = [json.loads(line)["credal"] for line in log.read_text().splitlines()]
    stored = {name: dict(np.load(log.parent / f"stats/{name}.npz")) for name in (
        "pseudo_labels", "predictions", "test_samples")}
    sample = stored["pseudo_labels"]
    assert len(reports) == 2 and all(len(report["alpha"]) == len(report["class"]) == FOLLOWED for report in reports)
    np.testing.assert_allclose(reports[-1]["alpha"], sample["alpha"][:FOLLOWED], atol=6e-6)  # rounded to five digits
    assert reports[-1]["class"] == sample["class"][:FOLLOWED].tolist()
    np.testing.assert_allclose(reports[-1]["deciles"], np.quantile(sample["alpha"], np.arange(11) / 10), atol=2e-5)
    np.testing.assert_allclose(sample["alpha"], 1 - sample["aligned"].max(1), atol=1e-6)
    assert reports[-1]["truth"] == pytest.approx(np.mean(sample["class"] == sample["labels"]), abs=1e-5)
    assert reports[-1]["truth"] < reports[-1]["upper"] < 1
    assert reports[0]["alpha"] != reports[1]["alpha"]

    p, labels, chosen = stored["predictions"]["probabilities"], stored["predictions"]["labels"], stored["test_samples"]
    sure, wrong = p.max(1), np.flatnonzero(p.argmax(1) != labels)
    unsure, worst = sorted(sure)[TEST_SAMPLE - 1], sorted(sure[wrong])[-TEST_SAMPLE]
    expected = {i for i in range(len(p)) if sure[i] <= unsure} | {i for i in wrong if sure[i] >= worst}
    assert set(chosen["index"].tolist()) == expected and len(chosen["images"]) == len(expected) >= TEST_SAMPLE
    from libml import data

    np.testing.assert_array_equal(chosen["images"], data.load("digits.1@40-1", "/nowhere").test_images[chosen["index"]])

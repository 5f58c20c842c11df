"""Benchmarks: what they compare is equal, what they print can be read by programs, and contenders take turns."""
import json

import bench
import pytest
from helpers import Program, invoke

from libml.augment import OPS
from libml.errors import UserError


def test_contenders_take_turns_and_the_best_round_counts():
    order, seconds = [], iter([0.0, 1.0, 5.0, 7.0, 4.0, 8.0])  # the first round warms up

    def contender(name):
        def measure():
            order.append(name)
            return next(seconds)
        return measure

    assert bench.take_turns(2, ours=contender("ours"), theirs=contender("theirs")) == {"ours": 4, "theirs": 7}
    assert order == ["ours", "theirs"] * 3


def test_rows_of_one_kind_are_one_table(monkeypatch):
    def data(rounds: int = 1):
        yield {"images": 8, "rate": 123.456 * rounds}
        yield {"images": 9, "rate": 0.5}
        yield {"op": "blur"}

    monkeypatch.setattr(bench, "data", data)
    lines = invoke(bench.main, "data", "--rounds=2").stdout.splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "---" not in line]
    assert cells == [["images", "rate"], ["8", "246.9"], ["9", "0.5000"], ["op"], ["blur"]]


@pytest.mark.slow
def test_augment(tmp_path):
    few = "import sys; sys.path.insert(0, 'scripts/lab'); import bench; bench.OPS = dict([*bench.OPS.items()][:3]); "
    done = Program(["-c", f"{few}sys.exit(bench.main())", "augment", "--json", "--images=8", "--dataset=digits.1@40-1",
                    "--rounds=1"], tmp_path)
    assert done.wait() == 0, done.error
    result, *operations = map(json.loads, done.output.splitlines())
    assert result["graph_images_per_s"] > 0
    assert result["ratio"] == pytest.approx(result["graph_images_per_s"] / result["pillow_images_per_s"], abs=0.01)
    assert [row["op"] for row in operations] == list(OPS)[:3]  # each of which XLA compiles


@pytest.mark.slow
def test_data():
    result = json.loads(invoke(bench.main, "data", "--dataset=digits.1@40-1", "--steps=5", "--rounds=2",
                               "--json").stdout)
    assert result["images_per_s"] > 0 and result["first_batch_s"] > 0


def test_predict_compares_equal_predictions():
    done = invoke(bench.main, "predict", "--json", "--files=64", "--keras_files=4", "--rounds=2", "--filters=4",
                  "--repeat=1", "--size=16")
    result = json.loads(done.stdout)
    assert result["largest_difference_of_a_logit"] < 1e-5  # batches of other sizes
    assert result["ratio"] > 5  # with so small a network calls are all that counts: some hundred


@pytest.mark.parametrize(("arguments", "message"), [
    (["methods", "--methods=vat,vatt"], "no method 'vatt'"), (["scale", "--only=width"], "expected names of batch"),
    (["scale", "--base={"], "--base={: expected"), (["scale", '--base={"width": 3}'], "expected names of batch")])
def test_unknown_names_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        invoke(bench.main, *arguments)

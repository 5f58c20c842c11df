"""The hooks of docs/tracking.md, each on a run that is broken off and continued."""
import csv

import pytest
from conftest import ROOT
from helpers import code_blocks

from cssl import CSSL, RunConfig, train

pytestmark = pytest.mark.slow
SETTINGS = dict(dataset="digits.1@40-1", batch=8, uratio=2, filters=4, repeat=1, scales=1, augment="d.d.x",
                report_kimg=0.03125, save_kimg=0.0625, train_steps=16)
STEPS = [32, 64, 96, 128]


def hook(name):
    """The function of that name in the document."""
    (code,) = [code for _, code in code_blocks(ROOT / "docs/tracking.md") if f"def {name}(" in code]
    session = {}
    exec(code, session)
    return session[name]


def broken_off(config, hook):
    """Trains until a report after the last checkpoint; that report will be made again."""
    def fail(trainer, report):
        if report["step"] == STEPS[2]:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        train(config, hooks=[hook, fail])


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return RunConfig.of(CSSL, **SETTINGS, train_dir="runs")


def test_csv(config):
    broken_off(config, hook("to_csv"))
    run = train(config, hooks=[hook("to_csv")])
    with open(run.path / "metrics.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == STEPS
    assert [float(row["nll"]) for row in rows] == [report["nll"] for report in run.reports]


def test_weights_and_biases(config, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed: pip install wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logged = []

    def to_wandb(trainer, report):
        hooked(trainer, report)
        if wandb.run:  # finished with the last report
            logged.append((wandb.run.id, report["step"]))
            assert wandb.run.summary["nll"] == report["nll"]
            assert wandb.run.config["train_dir"] == "runs" and wandb.run.config["batch"] == 8

    hooked = hook("to_wandb")
    broken_off(config, to_wandb)
    wandb.finish()  # as at the end of a process
    run = train(config, hooks=[to_wandb])
    known = (run.path / "wandb_id").read_text()
    assert logged == [(known, step) for step in (*STEPS[:3], STEPS[2])] and wandb.run is None
    another = train(config.replace(rerun="another"), hooks=[hooked])
    assert (another.path / "wandb_id").read_text() != known
    wandb.teardown()


def test_mlflow(config, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed: pip install mlflow")
    pytest.importorskip("sqlalchemy", reason="mlflow-skinny has no database: pip install mlflow")
    monkeypatch.setenv("GIT_PYTHON_REFRESH", "quiet")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    try:
        broken_off(config, hook("to_mlflow"))
        mlflow.end_run()  # as at the end of a process
        run = train(config, hooks=[hook("to_mlflow")])
        client = mlflow.MlflowClient()
        (tracked,) = client.search_runs(["0"])
        assert tracked.info.run_id == (run.path / "mlflow_id").read_text() and tracked.info.status == "FINISHED"
        assert tracked.data.params["batch"] == "8"
        history = {metric.step: metric.value for metric in client.get_metric_history(tracked.info.run_id, "nll")}
        assert history == {report["step"]: report["nll"] for report in run.reports}
    finally:
        mlflow.set_tracking_uri(before)

"""The estimate of memory: near what was measured, by the views that methods make, through heads and teachers."""
import os

import numpy as np
import pytest
import tensorflow as tf
from models import SMALL, tiny

import cssl
from cssl import CSSL, FixMatch, RunConfig, from_arrays
from libml import experiment, networks
from libml.devices import machine
from libml.errors import UserError
from libml.networks import memory
from libml.networks.builder import count_features
from libml.run import Run
from libml.train import Trainer

SHAPE = (32, 32, 3)


@pytest.fixture(scope="module")
def data():
    images, labels = np.zeros((40, *SHAPE), np.uint8), np.arange(40) % 4
    return from_arrays(images, labels, images, labels, name="arrays:x")


def test_the_estimate_is_near_what_was_measured(data):
    """WRN-28-2 at batch 64 took 6.7 GB; the estimate is for refusing what is hopeless: within a factor of 2."""
    config = RunConfig.of(CSSL).with_data(data)
    model = experiment.build(config, data)
    assert memory.images_of_update(config, model) == 64 * 15
    assert 3.3e9 < memory.count(config, SHAPE, 64 * 15, model) < 13.4e9
    with pytest.raises(UserError, match="needs about .* GB of memory, and there are 1 GB.*, or give --recompute"):
        memory.check(config, SHAPE, 10 ** 9, model=model)
    memory.check(config, SHAPE, 24 * 10 ** 9, model=model)
    memory.check(config, SHAPE, 10 ** 9, model=model, processes=20)
    frugal = config.replace(recompute=True)  # took 2.4 GB
    assert 1.2e9 < memory.count(frugal, SHAPE, 64 * 15, model) < 4.8e9
    with pytest.raises(UserError, match="Make one of them smaller.$"):
        memory.check(frugal, SHAPE, 10 ** 9, model=model)


RECOMPUTE, HALF, BOTH = "--recompute would", "--mixed_precision=float16 would", "both would"


@pytest.mark.parametrize(("gigabytes", "options", "replicas", "helps"), [
    (24, {}, 1, None), (4, {}, 1, {RECOMPUTE, HALF, BOTH}), (3, {}, 1, {RECOMPUTE, BOTH}), (2, {}, 1, {BOTH}),
    (1, {}, 1, {"a smaller --batch"}), (4, {}, 2, None), (3, {"recompute": True}, 1, None),
    (2, {"recompute": True}, 1, {HALF}), (3, {"mixed_precision": "float16"}, 1, {RECOMPUTE}),
    (4, {"arch": "cnn13", "filters": 128}, 1, {HALF})])
def test_gpus_that_are_too_small_come_with_the_flags_that_help(data, gigabytes, options, replicas, helps):
    """WRN-28-2 in full took 6.7 GB, 2.4 GB with --recompute; half precision halves the feature maps."""
    config = RunConfig.of(CSSL, **options).with_data(data)
    model = experiment.build(RunConfig.of(CSSL, **{"filters": 4, **options}).with_data(data), data)
    found = memory.gpu_shortage(config, SHAPE, int(gigabytes * 1e9), model=model, replicas=replicas)
    assert {text for text in (RECOMPUTE, HALF, BOTH, "a smaller --batch") if text in found} == (helps or set())
    assert (found == "") == (helps is None) and found.count(f"{gigabytes} GB: ") == bool(helps)


def test_methods_that_need_float32_are_not_told_of_half_precision(data):
    config = RunConfig.of(cssl.VAT).with_data(data)
    model = experiment.build(RunConfig.of(cssl.VAT, filters=4).with_data(data), data)
    assert "float16" not in memory.gpu_shortage(config, SHAPE, 10 ** 9, model=model)


def test_a_run_warns_of_a_gpu_that_is_too_small(data, tmp_path, monkeypatch):
    """What the driver tells is made up, and so is TensorFlow's GPU."""
    tell = tmp_path / "nvidia-smi"
    tell.write_text("#!/bin/sh\necho 'NVIDIA X, 80000 MiB'; echo 'NVIDIA X, 4000 MiB'; echo 'NVIDIA Y, 1000 MiB'\n")
    tell.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert machine.gpu_memory(["NVIDIA X"]) == 4000 << 20 and machine.gpu_memory(["NVIDIA Z"]) is None
    config = RunConfig.of(CSSL).with_data(data)
    run = Run(tmp_path, config=config, data=data, model=experiment.build(config.replace(filters=4), data))
    trainer = Trainer(run, tf.distribute.get_strategy())
    assert experiment._gpu_shortage(trainer) == ""
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: ["a GPU"])
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda gpu: {"device_name": "NVIDIA X"})
    trainer.log = (lines := []).append
    experiment._announce(trainer)
    (line,) = [line for line in lines if line.startswith("warning: an update needs about")]
    assert "of each GPU, and the smallest has 4.19 GB: --recompute would" in line
    tell.write_text("#!/bin/sh\necho 'Unable to determine the device handle'; exit 6\n")
    assert experiment._gpu_shortage(trainer) == ""


def test_of_weights_alone_where_feature_maps_are_elsewhere():
    memory.check(RunConfig.of(CSSL, batch=10 ** 12), SHAPE, 10 ** 9, weights_only=True)
    with pytest.raises(UserError, match="GB of memory"):
        memory.check(RunConfig.of(CSSL, filters=10 ** 5), SHAPE, 10 ** 9, weights_only=True)


@pytest.mark.parametrize(("name", "options"), [
    ("Supervised", {}), ("PseudoLabel", {}), ("FixMatch", {"K": 3}), ("MixMatch", {"K": 2}), ("CoMatch", {}),
    ("AdaMatch", {}), ("DeFixMatch", {}), ("CRMatch", {"K": 2}), ("ReMixMatch", {"K": 2})])
def test_images_are_counted_as_the_method_makes_them(data, name, options):
    config = RunConfig.of(cssl.method(name), batch=4, uratio=2, filters=4, repeat=1, scales=1, augment="d.d.x",
                          train_steps=1, **options).with_data(data)
    model = experiment.build(config, data)
    views = model.make_views(next(iter(data.dataset(model))))
    seen = sum(len(value) for key, value in views.items() if key in ("labeled", "labeled_strong", "weak", "strong"))
    assert memory.images_of_update(config, model) == seen >= memory.images_of_update(config)


def test_of_ready_networks_it_is_counted_from_their_layers():
    net, shape = tiny(), (8, 8, 3)
    # Rescaling and Normalization 8*8*3 each; conv, BN, ReLU, depthwise, separable, BN, dropout, add 8*8*6 each.
    assert count_features(net) == 64 * (2 * 3 + 8 * 6)
    config = RunConfig.of(FixMatch, dataset="digits.1@40-1", arch=SMALL, batch=10, uratio=3)
    model = FixMatch(net, 3, options=config.options)
    weights = sum(np.prod(v.shape) for v in net.trainable_variables)
    assert memory.count(config, shape, 70, model) == 4 * (5 * weights + 70 * count_features(net))
    assert memory.images_of_update(config, model) == 70
    with pytest.raises(UserError, match="needs about .* batch=10, uratio=3, arch=keras:MobileNet,alpha=0.1 on images "
                                        "of 224x224. Make one of them smaller"):
        memory.check(config, shape, 1000, model=model)
    memory.check(config, shape, 1)  # nothing is known before it is built


def test_ready_networks_may_have_heads_and_teachers():
    net = tiny()
    assert count_features(networks.Heads(net, {"rotation": 4})) == count_features(net)
    assert count_features(networks.TeacherAndStudent(net, tiny())) == 2 * count_features(net)


@pytest.mark.slow
def test_a_method_with_heads_trains_a_ready_network(tmp_path):
    config = RunConfig.of(cssl.SimMatch, dataset="digits.1@40-1", arch=SMALL, weights="none", image_size=32, batch=8,
                          uratio=1, augment="d.d.x", train_steps=1, train_dir=str(tmp_path))
    assert int(cssl.train(config).model.updates) == 1

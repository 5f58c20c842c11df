"""Configurations: presets, ranges, identity, folders, JSON; all without TensorFlow."""
import json
import math
import re
from pathlib import Path

import pytest

from cssl import cli, method, methods
from cssl.cssl import CSSL
from cssl.fixmatch import FixMatch
from cssl.fully_supervised import FullySupervised
from cssl.remixmatch import ReMixMatch
from cssl.vat import VAT
from libml.config import COMMON, HEADS, RunConfig, describe, option, sets_row_apart
from libml.data.names import DATASETS, Dataset
from libml.errors import OptionError, UserError


def test_options_are_given_then_preset_then_default():
    config = RunConfig.of(CSSL, dataset="digits.1@40-1", batch=8)
    assert (config.options.batch, config.network.filters, config.options.lr) == (8, 16, 0.03)
    assert "filters" in config.presets and "batch" not in config.presets and config.given == {"dataset", "batch"}
    config = RunConfig.of(CSSL, dataset="cifar100.1@400-1", wd=0.0005)
    assert (config.network.filters, config.options.wd) == (128, 0.0005)
    assert RunConfig.of(VAT, dataset="cifar100.1@400-1").options.wd == 0.02  # decoupled: another scale
    assert RunConfig.of(ReMixMatch, dataset="cifar10.1@40-1").options.K == 1
    assert RunConfig.of(FullySupervised, dataset="cifar10.1@40-1").data.dataset == "cifar10.1@all-1"


@pytest.mark.parametrize("values, message", [
    (dict(batch=0), "batch=0: expected a positive number"),
    (dict(batch=2.5), "batch=2.5: expected int"),
    (dict(lr="fast"), "lr='fast': expected float"),
    (dict(confidence=1.5), "confidence=1.5: expected a number from 0 to 1"),
    (dict(wd=-1.0), "wd=-1.0: expected 0 or more"),
    (dict(arch="vgg"), "arch=vgg: expected resnet"),
    (dict(lr=math.nan), "lr=nan: expected a finite number"),
    (dict(train_kimg=math.inf), "train_kimg=inf: expected a finite number"),
    (dict(batchsize=3), "batchsize=3: CSSL has no such option"),
    (dict(filter=3), "did you mean filters?"),
    (dict(train_steps=0), "train_steps=0: expected a positive number"),
    (dict(train_kimg=2, schedule_kimg=1), "is shorter than"),
])
def test_bad_options_are_one_line(values, message):
    with pytest.raises(UserError, match=message.replace("(", r"\(").replace("?", r"\?")) as caught:
        RunConfig.of(CSSL, **values)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", sorted(methods()))
def test_no_number_of_any_method_may_be_nan_or_infinite(name):
    kind = method(name)
    for option_name, field in RunConfig.fields(kind).items():
        if type(field.default) is float:
            for value in (math.nan, math.inf, -math.inf):
                with pytest.raises(OptionError):
                    RunConfig.of(kind, **{option_name: value})


def test_values_as_python_programs_have_them():
    import numpy as np

    config = RunConfig.of(CSSL, lr=np.float64(0.1), batch=np.int64(8), train_dir=Path("runs"))
    assert (config.options.lr, config.options.batch, config.data.train_dir) == (0.1, 8, "runs")
    assert type(config.options.batch) is int
    with pytest.raises(OptionError, match="no such option"):
        config.replace(nonsense=1)
    for steps in (10 ** 400, 3.5, 10 ** 16):
        with pytest.raises(OptionError, match="train_"):
            RunConfig.of(CSSL, train_steps=steps)


def test_a_number_with_a_range_accepts_its_ends():
    assert RunConfig.of(CSSL, confidence=0.0, alpha_bound=1.0).options.alpha_bound == 1.0
    assert RunConfig.of(CSSL, lr=1).options.lr == 1.0


def test_json_round_trip_and_differences():
    config = RunConfig.of(CSSL, dataset="digits.2@40-1", lr=0.1, seed=3)
    assert RunConfig.from_json(CSSL, json.loads(config.to_json())) == config
    stored = json.loads(config.to_json())
    assert config.differences(stored) == {}
    assert config.differences(stored | {"lr": 0.2, "keep_ckpt": 9, "train_dir": "/else"}) == {"lr": (0.2, 0.1)}
    assert config.replace(train_kimg=60.0).differences(stored) == {"schedule_kimg": (30.0, 60.0)}
    assert config.differences(stored | {"method": "FixMatch"}) == {"method": ("FixMatch", "CSSL")}
    del stored["reference"]  # a version before that option
    assert config.differences(stored) == {} and RunConfig.from_json(CSSL, stored) == config


def test_folder_is_the_originals():
    config = RunConfig.of(CSSL, dataset="cifar10.3@40-1", train_dir="runs")
    assert config.folder() == Path(
        "runs/cifar10.d.d.d.3@40-1/CTAugment_depth2_th0.80_decay0.990/CSSL_alpha_bound0.0_archresnet_batch64_confidence"
        "0.0_filters32_lr0.03_repeat4_scales3_uratio7_wd0.0005_wu1.0")
    changed = RunConfig.of(FixMatch, dataset="cifar10.3@40-1", rerun="again", ema=0.9, augment="d.d.rac", seed=1,
                           train_kimg=5, keep_ckpt=1, report_kimg=1.0)
    assert changed.folder() == Path(
        "experiments/again/cifar10.d.d.rac.3@40-1/Augment_rac/FixMatch_archresnet_batch64_confidence0.95_ema0.9_"
        "filters32_lr0.03_repeat4_scales3_seed1_uratio7_wd0.0005_wu1.0")


def test_folder_of_own_images_has_their_name_not_their_path(tmp_path):
    names = {RunConfig.of(CSSL, dataset=f"folder:{tmp_path}/{place}/birds.1@all-0").folder().parts[-3]
             for place in ("a", "b")}
    assert len(names) == 2  # two folders of one name stay apart
    for name in names:
        assert name.startswith("folder-birds-") and name.endswith(".d.d.d.1@all-0") and ":" not in name


def test_long_names_are_cut_but_stay_apart():
    """What is named last differs; shorter names are whole."""
    def name(**options):
        prior = ",".join(["0.12345678901"] * 10)
        return RunConfig.of(CSSL, dataset="cifar10.1@40-1", p_unlabeled=prior, **options).folder().name

    first, second = name(wu=1.0), name(wu=2.0)
    assert first != second and first[:241] == second[:241]
    assert len(first) == len(second) == 250 and re.fullmatch("-[0-9a-f]{8}", first[241:])
    whole = RunConfig.of(CSSL, dataset="cifar10.1@40-1", p_unlabeled=",".join(["0.1"] * 10)).folder().name
    assert len(whole) < 250 and whole.endswith("_wu1.0")


def test_a_new_dataset_gets_its_stages_and_presets_by_itself(monkeypatch):
    monkeypatch.setitem(DATASETS, "tiny", Dataset(64, presets={"filters": 8}))
    config = RunConfig.of(CSSL, dataset="tiny.1@10-0")
    assert (config.network.scales, config.network.filters) == (4, 8)
    assert RunConfig.of(CSSL, dataset="stl10.1@1000-1").network.scales == 5
    assert RunConfig.of(CSSL, dataset="folder:/x.1@10-0", image_size=64).network.scales == 4


def test_an_option_says_once_what_it_is():
    """Flags, help, folder and tables read the same declaration."""
    class Options(CSSL.Options):
        """One more."""

        zeta: float = option(0.5, "a new number", low=0, high=1, named=True)

    class Own(CSSL):
        """A method of the user's."""

    Own.Options = Options
    config = cli.configuration(Own, ["own.py", "--dataset=digits.1@40-1", "--zeta=0.25"])
    assert config.options.zeta == 0.25 and "_zeta0.25" in config.folder().name
    assert re.search(r"--zeta=0.5 +a new number\n", cli.help_text(Own))
    with pytest.raises(UserError, match="zeta=2.0: expected a number from 0 to 1"):
        cli.configuration(Own, ["own.py", "--zeta=2"])
    assert sets_row_apart("zeta") and sets_row_apart("train_kimg") and not sets_row_apart("seed")


def test_units_of_the_papers_runs():
    config = RunConfig.of(CSSL, dataset="cifar10.1@40-1")
    assert config.updates == 2 ** 20 and config.report_updates == 1024
    assert config.replace(train_kimg=1048576.0).updates == 2 ** 24
    short = config.replace(train_kimg=8192.0, schedule_kimg=65536.0)  # the cosine keeps its full horizon
    assert short.updates == 2 ** 17 and short.total_images == 2 ** 26


def test_networks_of_the_flag_are_those_there_are():
    from libml import networks

    assert set(COMMON["arch"].metadata["choices"]) == {*networks.ARCHITECTURES, *HEADS}


def test_every_option_has_a_range_or_says_why_not():
    """A number without bounds is one that may really be anything."""
    free = {name for kind in map(method, methods()) for name, field in RunConfig.fields(kind).items()
            if type(field.default) in (int, float)
            and all(field.metadata[bound] is None for bound in ("low", "high", "above"))}
    assert free == set()


def test_data_dir_comes_from_flag_then_environment(monkeypatch):
    monkeypatch.setenv("ML_DATA", "/from/environment")
    argv = ["cssl.py", "--dataset=digits.1@40-1"]
    assert cli.configuration(CSSL, argv).data.data_dir == "/from/environment"
    assert cli.configuration(CSSL, [*argv, "--data_dir=/from/flag"]).data.data_dir == "/from/flag"


def test_describe_lists_fields():
    assert list(describe(CSSL.Options))[-3:] == ["confidence", "alpha_bound", "reference"]

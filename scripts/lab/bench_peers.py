"""Measures a whole training step against bare steps of the same network: Keras's, and PyTorch's where there is one.

    python scripts/lab/bench_peers.py [--torch=PYTHON] [--settings=WRN-28-2,WRN-10-1,digits] [--rounds=5] [--json]

The whole step is the training loop's: batch, weak and strong views, policies, one forward and backward pass, SGD,
averages, alignment, CTAugment's probe and its rates. A bare step is forward pass, cross-entropy, backward pass and SGD
on as many ready float images. The contenders take turns and the best of several rounds counts. --torch names the Python
of an environment with PyTorch, which is no dependency of this project; its network is the same, channels last. The last
columns are of a whole run on the digits, with input, reports, evaluation and checkpoints: seconds from one report to
the next over updates, the same over those of bare steps that were made between the reports (the best of each), and
which part of the run was not spent on updates.
"""
import argparse
import contextlib
import io
import json
import subprocess
import sys
import tempfile
import time

SETTINGS = {"WRN-28-2": dict(batch=64, filters=32, repeat=4, scales=3, size=32),
            "WRN-10-1": dict(batch=16, filters=16, repeat=1, scales=3, size=32),
            "digits": dict(batch=32, filters=16, repeat=1, scales=3, size=16)}
URATIO, CLASSES = 7, 10
ROUND_SECONDS = 1.0  # a round repeats steps that are shorter


def images_of(setting: dict) -> int:
    """Images of one forward pass: labelled, weak and strong views."""
    return setting["batch"] * (1 + 2 * URATIO)


# PyTorch, in a process of its own environment: must import nothing of this project.

def serve_torch(setting: dict) -> None:
    """Runs as many steps as each line on stdin says, and answers with the seconds of one."""
    import torch
    from torch import nn

    def conv(channels, filters, size, stride=1):
        return nn.Conv2d(channels, filters, size, stride, padding=size // 2)

    class Block(nn.Module):
        def __init__(self, channels, filters, stride, activate_shortcut):
            super().__init__()
            self.norm1, self.conv1 = nn.BatchNorm2d(channels, 1e-3, 1e-3), conv(channels, filters, 3, stride)
            self.norm2, self.conv2 = nn.BatchNorm2d(filters, 1e-3, 1e-3), conv(filters, filters, 3)
            self.shortcut = conv(channels, filters, 1, stride) if channels != filters else nn.Identity()
            self.activate_shortcut = activate_shortcut

        def forward(self, x):
            y = nn.functional.leaky_relu(self.norm1(x), 0.1)
            x = y if self.activate_shortcut else x
            y = self.conv2(nn.functional.leaky_relu(self.norm2(self.conv1(y)), 0.1))
            return y + self.shortcut(x)

    layers, channels = [conv(3, 16, 3)], 16
    for stage in range(setting["scales"]):
        for block in range(setting["repeat"]):
            filters = setting["filters"] << stage
            layers.append(Block(channels, filters, 2 if stage and not block else 1, not stage and not block))
            channels = filters
    layers += [nn.BatchNorm2d(channels, 1e-3, 1e-3), nn.LeakyReLU(0.1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
               nn.Linear(channels, CLASSES)]
    network = nn.Sequential(*layers).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(network.parameters(), 0.03, momentum=0.9, nesterov=True)
    x = torch.rand(images_of(setting), 3, setting["size"], setting["size"]).to(memory_format=torch.channels_last)
    y = torch.randint(0, CLASSES, [images_of(setting)])

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(network(2 * x - 1), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    print(json.dumps({"torch": torch.__version__, "weights": sum(p.numel() for p in network.parameters())}), flush=True)
    for line in sys.stdin:
        begun = time.perf_counter()
        for _ in range(int(line)):
            step()
        print((time.perf_counter() - begun) / int(line), flush=True)


# Ours and Keras's, here.

def contenders(setting: dict) -> tuple[dict, int]:
    """Returns functions that run a number of whole and of bare steps and return the seconds of one; the weights."""
    import keras
    import numpy as np
    import tensorflow as tf

    from cssl import CSSL, RunConfig
    from libml import data, experiment, networks
    from libml.train import distributed_batches, update_loop

    rng = np.random.RandomState(0)
    images = rng.randint(0, 256, (2000, setting["size"], setting["size"], 3)).astype(np.uint8)
    labels = np.arange(len(images)) % CLASSES
    dataset = data.from_arrays(images, labels, images[:10], labels[:10], num_labels=40)
    config = RunConfig.of(CSSL, uratio=URATIO, **{name: value for name, value in setting.items() if name != "size"})
    config = config.with_data(dataset)
    model, bare = experiment.build(config, dataset), experiment.build(config, dataset).network
    loop = update_loop(model, tf.distribute.get_strategy())
    batches = distributed_batches(dataset, tf.distribute.get_strategy(), batch=setting["batch"], uratio=URATIO)
    bare.compile(optimizer=keras.optimizers.SGD(0.03, momentum=0.9, nesterov=True),
                 loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x = tf.constant(rng.uniform(-1, 1, (images_of(setting), *images.shape[1:])).astype(np.float32))
    y = tf.constant(rng.randint(0, CLASSES, images_of(setting)))

    def timed(run):
        def seconds(count: int) -> float:
            begun = time.perf_counter()
            run(count)
            return (time.perf_counter() - begun) / count
        return seconds

    return {"whole": timed(lambda count: loop(batches, tf.constant(count, tf.int64)).numpy()),
            "keras": timed(lambda count: [float(bare.train_on_batch(x, y)) for _ in range(count)])
            }, networks.count_weights(model.network)


def measure(name: str, torch: str | None, rounds: int) -> dict:
    """Times all contenders of a setting, in turns."""
    setting = SETTINGS[name]
    steps, weights = contenders(setting)
    peer = None
    if torch:
        peer = subprocess.Popen([torch, __file__, f"--serve={json.dumps(setting)}"], stdin=subprocess.PIPE,
                                stdout=subprocess.PIPE, text=True)
        assert peer.stdin and peer.stdout
        facts = json.loads(peer.stdout.readline())
        assert facts["weights"] == weights, f"PyTorch's network has {facts['weights']} weights, ours {weights}"
        to, answers = peer.stdin, peer.stdout

        def run_torch(count: int) -> float:
            print(count, file=to, flush=True)
            return float(answers.readline())

        steps["torch"] = run_torch
    best = {}
    for contender, step in steps.items():
        step(1)  # traces, compiles, fills caches
        best[contender] = step(1)
    counts = {contender: max(1, round(ROUND_SECONDS / seconds)) for contender, seconds in best.items()}
    for _ in range(rounds):
        for contender, step in steps.items():
            best[contender] = min(best[contender], step(counts[contender]))
    if peer is not None:
        peer.kill()
    return {"setting": name, "images": images_of(setting), **{f"{key}_s": value for key, value in best.items()}}


def inside_a_run() -> dict:
    """Returns seconds per update of a run on the digits, all that it does from report to report, those of bare steps
    between its reports, and the share of the run that is no training."""
    from cssl import CSSL, RunConfig
    from libml import experiment

    bare, bare_steps = contenders(SETTINGS["digits"])[0]["keras"], 8
    bare(2)
    ours: list[float] = []
    theirs: list[float] = []
    training: list[float] = []
    begun = 0.0

    def take_turns(trainer, report: dict) -> None:
        nonlocal begun
        ours.append((time.perf_counter() - begun) / trainer.report_updates)
        training.append((1 + URATIO) * trainer.batch / report["images_per_s"])
        theirs.append(bare(bare_steps))
        begun = time.perf_counter()

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        experiment.train(RunConfig.of(CSSL, dataset="digits.1@40-1", train_dir=folder), hooks=[take_turns])
    return {"run_s": min(ours[1:]), "bare_s": min(theirs[1:]), "reports": 1 - sum(training[1:]) / sum(ours[1:])}


def main() -> None:
    """Prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", metavar="PYTHON", help="the Python of an environment with PyTorch")
    parser.add_argument("--settings", default=",".join(SETTINGS), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve_torch(json.loads(args.serve))
        return

    from cssl import cli

    cli.start_tensorflow()
    from libml import experiment
    from libml.results import tables

    facts = experiment.environment_facts()
    rows = [measure(name, args.torch, args.rounds) for name in args.settings.split(",")]
    for row in rows:
        if row["setting"] == "digits":
            row |= inside_a_run()
    if args.json:
        print(json.dumps({"machine": facts["machine"], "rows": rows}))
        return
    lines = [["setting", "images", "whole step, s", "bare Keras, s", "whole / Keras", "bare PyTorch, s",
              "whole / PyTorch", "inside a run, s", "inside / Keras", "reports, %"]]
    for row in rows:
        torch = row.get("torch_s")
        lines.append([row["setting"], str(row["images"]), f"{row['whole_s']:.4f}", f"{row['keras_s']:.4f}",
                      f"{row['whole_s'] / row['keras_s']:.3f}", f"{torch:.4f}" if torch else "–",
                      f"{row['whole_s'] / torch:.3f}" if torch else "–",
                      *((f"{row['run_s']:.4f}", f"{row['run_s'] / row['bare_s']:.3f}", f"{100 * row['reports']:.1f}")
                        if "run_s" in row else "–––")])
    print(f"{facts['machine']}, commit {facts['commit']}\n\n{tables.markdown(lines)}")


if __name__ == "__main__":
    main()

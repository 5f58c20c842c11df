"""Compiles the training step for GPUs that are not there, and says what it needs: memory, launches, time at best.

    python scripts/lab/gpu_compile.py [--only="WRN-28-2 float32"]

TensorFlow gives XLA the whole step of CSSL on CIFAR-10 as it would on a GPU, and XLA compiles it for A100 and H100 by
what is known of them. That XLA, newer than TensorFlow's, comes with jax's wheels, in .venv-gpu, which is made once (1.2
GB). Prints a table, which docs/evidence/gpu.md explains; exit code 1, and a line for each, if something is beyond its
limit.
"""
import itertools
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cssl import CSSL, RunConfig, cli, tools
from cssl.program import exit_on_user_error

cli.start_tensorflow()  # quietly, before anything else does

import tensorflow as tf

from libml import experiment
from libml.data import DataFacts
from libml.errors import UserError
from libml.results import tables

ENVIRONMENT = Path(__file__).resolve().parents[2] / ".venv-gpu"
PYTHON = ENVIRONMENT / "bin" / "python"
PACKAGES = ("jax==0.10.2", "jaxlib==0.10.2", "jax-cuda12-plugin==0.10.2", "jax-cuda12-pjrt==0.10.2",
            "nvidia-cuda-nvcc-cu12==12.9.86")
NETWORKS = {"WRN-28-2": 32, "WRN-28-8": 128}  # filters
PRECISIONS = {"float32": "off", "float16": "float16"}  # --mixed_precision
FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all")  # they launch nothing
# Of the smaller network's step without --recompute:
MAX_MEMORY, MAX_LAUNCHES = {"WRN-28-2 float32": 4.1e9, "WRN-28-2 float16": 2.0e9}, 750
COLUMNS = ["step (views included)", "GPU", "temporary memory, GB", "launches", "loops of unknown length", "TFLOP",
           "GB moved", "roofline, ms"]
PEAKS = {"A100": {"float32": 156e12, "float16": 312e12},  # operations/s of tensor cores without sparsity;
         "H100": {"float32": 494.7e12, "float16": 989.4e12}}  # TF32 for float32


def description(gpu: str) -> Path:
    """Returns the file with what is known of a GPU, in the form in which XLA reads it."""
    return Path(__file__).with_name(f"{gpu}.txtpb")


def bandwidth(gpu: str) -> float:
    return float(re.findall(r"memory_bandwidth: (\d+)", description(gpu).read_text())[0])


class Instruction(NamedTuple):
    result: str  # type and shape of one or several arrays
    opcode: str
    operands: list[str]  # their names
    attributes: str


def parse(hlo: str) -> dict[str, dict[str, Instruction]]:
    """Returns the instructions of a module by computation and name; those of the entry under ""."""
    computations: dict[str, dict[str, Instruction]] = {}
    for line in hlo.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line)
        found = re.match(r"  (?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*?)\)(.*)", line)
        if head:
            instructions = computations["" if head[1] else head[2]] = {}
        elif found:
            name, result, opcode, operands, attributes = found.groups()
            instructions[name] = Instruction(result, opcode, re.findall(r"%([\w.-]+)", operands), attributes)
    return computations


def arrays(text: str) -> list[tuple[int, list[int]]]:
    """Returns bytes of an element, and shapes, of typed arrays."""
    found = re.findall(r"\b(?:pred|[a-z]+(\d+))\[([\d,]*)\]", text)
    return [(int(bits or 8) // 8, [int(size) for size in sizes.split(",") if size]) for bits, sizes in found]


def nbytes(text: str) -> int:
    return sum(size * math.prod(shape) for size, shape in arrays(text))


def operations(instruction: Instruction, others: dict[str, Instruction]) -> int:
    """Returns the additions and multiplications of a convolution, or of a gradient of one; 0 of anything else."""
    kind = re.search(r'custom_call_target="__cudnn\$conv(\w+)"', instruction.attributes)
    labels = re.search(r"dim_labels=\w+->(\w+)", instruction.attributes)
    if not kind or not labels:
        return 0
    operands = [others[name] for name in instruction.operands[:2]]
    result, first, second = (arrays(array.result)[0][1] for array in (instruction, *operands))
    # Labels are those of the forward pass, where each number of the kernel meets each place of the output once.
    roles = {"BackwardFilter": (result, second), "BackwardInput": (second, first)}
    kernel, output = roles.get(kind[1], (second, result))
    return 2 * math.prod(kernel) * math.prod(output[labels[1].index(label)] for label in "b01")


@dataclass
class Cost:
    launches: int = 0
    unknown: int = 0  # loops of unknown length, and branches: the host has to ask
    operations: int = 0
    moved: int = 0  # bytes
    seconds: float = 0.0


def cost(computations: dict[str, dict[str, Instruction]], bandwidth: float, peak: float) -> Cost:
    """Adds up a module's kernels, those of loops as often as they are run, of loops of unknown length once."""
    total = Cost()

    def add(computation: str, times: int) -> None:
        instructions = computations[computation]
        for instruction in instructions.values():
            if instruction.opcode in ("while", "conditional", "call"):
                turns = re.search(r'known_trip_count":\{"n":"(\d+)"', instruction.attributes)
                total.unknown += turns is None and instruction.opcode != "call"
                for called in re.findall(r"(?:body|to_apply|_computation)=%?([\w.-]+)", instruction.attributes):
                    add(called, times * int(turns[1] if turns else 1))
            elif instruction.opcode not in FREE and not instruction.opcode.endswith("-done"):
                read = sum(nbytes(instructions[name].result) for name in {*instruction.operands})
                moved, count = read + nbytes(instruction.result), operations(instruction, instructions)
                total.launches += times
                total.moved += times * moved
                total.operations += times * count
                total.seconds += times * max(moved / bandwidth, count / peak)

    add("", 1)
    return total


def beyond(name: str, found: Cost, temporary: int) -> list[str]:
    lines = [f"{name}: {found.unknown} loops of unknown length; expected none"] if found.unknown else []
    if name in MAX_MEMORY and temporary > MAX_MEMORY[name]:
        lines.append(f"{name}: {temporary / 1e9:.2f} GB; expected at most {MAX_MEMORY[name] / 1e9:g}")
    if name in MAX_MEMORY and found.launches > MAX_LAUNCHES:
        lines.append(f"{name}: {found.launches} launches; expected at most {MAX_LAUNCHES}")
    return lines


def export(whole: bool, filters: int, precision: str, recompute: bool, **options: int) -> bytes:
    """Returns the views, or the whole step with them, as TensorFlow gives it to XLA for a GPU."""
    config = RunConfig.of(CSSL, dataset="cifar10.1@40-1", filters=filters, recompute=recompute,
                          mixed_precision=PRECISIONS[precision], **options)
    model = experiment.build(config, DataFacts(list("0123456789"), (32, 32, 3), (40, 50_000), True))
    model.augmenter.jit_compile = model.augmenter.on_gpu = True
    labeled, unlabeled = config.options.batch, config.options.batch * config.options.uratio
    batch = {"labeled": tf.zeros([labeled, 32, 32, 3], tf.uint8), "label": tf.zeros([labeled], tf.int32),
             "unlabeled": tf.zeros([unlabeled, 32, 32, 3], tf.uint8),
             "unlabeled_label": tf.zeros([unlabeled], tf.int32)}

    @tf.function(jit_compile=True, autograph=False)
    def step(state, batch):
        views = model.make_views(batch, state)
        return model.update.next_state(state, views) if whole else views

    state = model.update.pack(model.update.read())
    return step.experimental_get_compiler_ir(state, batch)(stage="hlo_serialized", platform_name="GPU")


def compiled(gpu: str, hlo: bytes, folder: Path) -> tuple[str, int]:
    """Returns what XLA makes of a module for a GPU, as text, and the bytes of its temporary memory."""
    source, result = folder / "module", folder / "compiled"
    source.write_bytes(hlo)
    done = subprocess.run([PYTHON, Path(__file__).with_name("gpu_compile_xla.py"), description(gpu), source, result],
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise UserError(f"XLA does not compile this for {gpu}: {done.stdout.strip()[-500:]}")
    found = json.loads(result.read_text())
    return found["hlo"], found["temporary"]


def main() -> int:
    parser = tools.parser(__doc__)
    parser.add_argument("--only", default="", help="steps that have this in their name")
    args = parser.parse_args()
    complete = ENVIRONMENT / "complete"
    if not complete.exists():
        for command in ([sys.executable, "-m", "venv", ENVIRONMENT],
                        [PYTHON, "-m", "pip", "install", "--disable-pip-version-check", *PACKAGES]):
            if subprocess.run(command, stdout=sys.stderr).returncode:
                raise UserError(f"{ENVIRONMENT} could not be made, see above: that needs Python 3.11, a package index "
                                "and 1.2 GB.")
        complete.touch()
    lines, problems = [COLUMNS], []
    modules = [("views alone", False, "WRN-28-2", "float32", False)]  # the same for all
    modules += [(f"{network} {precision}{' --recompute' * recompute}", True, network, precision, recompute)
                for network, precision, recompute in itertools.product(NETWORKS, PRECISIONS, (False, True))]
    with tempfile.TemporaryDirectory() as folder:
        for name, whole, network, precision, recompute in modules:
            if args.only not in name:
                continue
            hlo = export(whole, NETWORKS[network], precision, recompute)
            for gpu, peaks in PEAKS.items():
                text, temporary = compiled(gpu, hlo, Path(folder))
                found = cost(parse(text), bandwidth(gpu), peaks[precision])
                lines.append([name, gpu, f"{temporary / 1e9:.2f}", str(found.launches), str(found.unknown),
                              f"{found.operations / 1e12:.3f}", f"{found.moved / 1e9:.1f}",
                              f"{1e3 * found.seconds:.1f}"])
                problems += [f"{gpu}: {line}" for line in beyond(name, found, temporary)]
                print(" | ".join(lines[-1]), file=sys.stderr, flush=True)
    facts = experiment.environment_facts()
    print(f"{facts['command']}, commit {facts['commit']}, {time.strftime('%Y-%m-%d')}, {facts['machine']}, "
          f"TensorFlow {facts['tensorflow']}, {', '.join(PACKAGES)}\n\n{tables.markdown(lines)}")
    print("".join(f"\nbeyond its limit: {line}" for line in problems), end="")
    return int(bool(problems))


if __name__ == "__main__":
    exit_on_user_error(main)

"""Compiles a module for a GPU that is not there: gpu_compile.py calls this with the Python of its own environment."""
import json
import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"  # jax itself shall not look for GPUs

from jax._src import compiler
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir
from jax.experimental import topologies
from jaxlib import _jax, xla_client

description, source, result = map(Path, sys.argv[1:])
topology = topologies.get_topology_desc(platform="cuda", topology_name="", topology="1x1x1",
                                        target_config=description.read_text())
device = topology.devices[0]
with mlir.make_ir_context():
    module = ir.Module.parse(_jax.mlir.hlo_to_stablehlo(source.read_bytes()))
done = device.client.compile(module, executable_devices=xla_client.DeviceList((device,)),
                             compile_options=compiler.get_compile_options(num_replicas=1, num_partitions=1))
result.write_text(json.dumps({"hlo": done.hlo_modules()[0].to_string(),
                              "temporary": done.get_compiled_memory_stats().temp_size_in_bytes}))

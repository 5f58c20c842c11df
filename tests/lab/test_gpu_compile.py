"""What a compiled step costs on a GPU, reckoned from XLA's text. (XLA for GPUs: the script, in its environment.)"""
import gpu_compile
import pytest

# Two turns of a loop, a convolution of 2 images (3 channels, 8x8; kernel 3x3, 4 filters), a fusion and its gradients.
HLO = """HloModule step, is_scheduled=true, entry_computation_layout={(f32[2,3,8,8]{3,2,1,0})->f32[4]{0}}

%fused_add (p0: f32[4], p1: f32[4]) -> f32[4] {
  %p0 = f32[4]{0} parameter(0)
  %p1 = f32[4]{0} parameter(1)
  ROOT %sum = f32[4]{0} add(%p0, %p1)
}

%body (turn: (s32[], u8[1000])) -> (s32[], u8[1000]) {
  %turn = (s32[], u8[1000]{0}) parameter(0)
  %bytes = u8[1000]{0} get-tuple-element(%turn), index=1
  %changed = u8[1000]{0} fusion(%bytes), kind=kLoop, calls=%whatever
  ROOT %result = (s32[], u8[1000]{0}) tuple(%count, %changed)
}

ENTRY %main.7 (x: f32[2,3,8,8], k: f32[4,3,3,3], b: f32[4]) -> f32[4] {
  %x = f32[2,3,8,8]{3,2,1,0} parameter(0)
  %k = f32[4,3,3,3]{3,2,1,0} parameter(1), metadata={op_name="k (kernel)"}
  %b = f32[4]{0} parameter(2)
  %conv.1 = (f32[2,4,8,8]{3,2,1,0}, u8[0]{0}) custom-call(%x, %k, %b), window={size=3x3 pad=1_1x1_1}, \
dim_labels=bf01_oi01->bf01, custom_call_target="__cudnn$convBiasActivationForward"
  %y = f32[2,4,8,8]{3,2,1,0} get-tuple-element(%conv.1), index=0
  %conv.2 = (f32[4,3,3,3]{3,2,1,0}, u8[0]{0}) custom-call(%x, %y), window={size=3x3 pad=1_1x1_1}, \
dim_labels=bf01_oi01->bf01, custom_call_target="__cudnn$convBackwardFilter"
  %conv.3 = (f32[2,3,8,8]{3,2,1,0}, u8[0]{0}) custom-call(%y, %k), window={size=3x3 pad=1_1x1_1}, \
dim_labels=bf01_oi01->bf01, custom_call_target="__cudnn$convBackwardInput"
  %start = (s32[], u8[1000]{0}, /*index=2*/f16[5]{0}) tuple(%zero, %noise)
  %loop = (s32[], u8[1000]{0}) while(%start), condition=%cond, body=%body, \
backend_config={"known_trip_count":{"n":"2"},"known_init_step":{"init":"0","step":"1"}}
  ROOT %out = f32[4]{0} fusion(%b, %b), kind=kLoop, calls=%fused_add
}
""".replace("\\\n", "")


def test_the_text_of_a_module_is_read():
    computations = gpu_compile.parse(HLO)
    assert list(computations) == ["fused_add", "body", ""]
    entry = computations[""]
    assert entry["conv.1"].opcode == "custom-call" and entry["conv.1"].operands == ["x", "k", "b"]
    assert entry["conv.1"].result == "(f32[2,4,8,8]{3,2,1,0}, u8[0]{0})"
    assert entry["x"].opcode == "parameter" and entry["out"].operands == ["b", "b"]
    assert gpu_compile.nbytes(entry["start"].result) == 4 + 1000 + 10  # its comment is no array


def test_costs_are_those_counted_by_hand():
    convolution = 2 * (2 * 8 * 8) * (3 * 3 * 3 * 4)  # places of the output, each with all of the kernel
    image, kernel, output = 4 * 2 * 3 * 8 * 8, 4 * 4 * 3 * 3 * 3, 4 * 2 * 4 * 8 * 8  # bytes
    moved = [image + kernel + 16 + output, image + output + kernel, output + kernel + image, 2000, 2000, 32]
    found = gpu_compile.cost(gpu_compile.parse(HLO), bandwidth=1e9, peak=1e9)
    assert found.launches == 6 and found.unknown == 0  # three convolutions, two turns, a fusion
    assert found.operations == 3 * convolution and found.moved == sum(moved)
    assert convolution > max(moved)  # so that at a unit of each a second operations last longer
    assert found.seconds == pytest.approx((3 * convolution + 2000 + 2000 + 32) / 1e9)
    fast = gpu_compile.cost(gpu_compile.parse(HLO), bandwidth=1e9, peak=1e15)  # nothing but bytes
    assert fast.seconds == pytest.approx(sum(moved) / 1e9)


def test_channels_last_count_as_channels_first():
    last = HLO.replace("[2,3,8,8]", "[2,8,8,3]").replace("[2,4,8,8]", "[2,8,8,4]").replace("[4,3,3,3]", "[4,3,3,3]")
    last = last.replace("bf01_oi01->bf01", "b01f_o01i->b01f")
    costs = [gpu_compile.cost(gpu_compile.parse(text), 1e9, 1e9) for text in (HLO, last)]
    assert costs[0] == costs[1]


def test_what_the_host_must_decide_is_counted_and_refused():
    found = gpu_compile.cost(gpu_compile.parse(HLO.replace("known_trip_count", "unknown")), 1e9, 1e9)
    assert found.unknown == 1 and found.launches == 5  # of a loop of unknown length one turn
    (line,) = gpu_compile.beyond("WRN-28-8 float16", found, 0)
    assert "1 loops of unknown length" in line


def test_limits():
    def lines(name: str, memory: float, launches: int) -> list[str]:
        return gpu_compile.beyond(name, gpu_compile.Cost(launches=launches), int(memory))

    assert not lines("WRN-28-2 float32", 4.1e9, 750) and not lines("WRN-28-2 float16", 2e9, 750)
    assert ["4.20 GB" in line for line in lines("WRN-28-2 float32", 4.2e9, 750)] == [True]
    assert ["751 launches" in line for line in lines("WRN-28-2 float16", 1e9, 751)] == [True]
    assert not lines("WRN-28-8 float32", 40e9, 900) and not lines("WRN-28-2 float32 --recompute", 5e9, 900)


def test_a_description_has_bytes_and_hertz():
    assert [gpu_compile.bandwidth(gpu) for gpu in gpu_compile.PEAKS] == [2.039e12, 3.352e12]
    text = gpu_compile.description("A100").read_text()
    for line in ("device_memory_size: 85899345920", "memory_bandwidth: 2039000000000", "l2_cache_size: 41943040",
                 "shared_memory_per_core: 167936", "clock_rate_ghz: 1.41", "capability: { major: 8 minor: 0 }"):
        assert line in text


def test_the_step_is_exported_as_for_a_gpu():
    views, step = (gpu_compile.export(whole, 16, "float32", False, repeat=1, scales=2, batch=2, uratio=1)
                   for whole in (False, True))
    assert b"convolution" in step and b"convolution" not in views  # the network is in the step alone

"""The analytic cost model: formulas at their limits, sizes of known models, and what must grow or fall."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from compiler.catalog import DEVICES, model_names, model_shape
from compiler.cluster_file import read_cluster
from compiler.cost import generation, training, transition
from compiler.cost.compute import layer_decode, layer_forward
from compiler.cost.layouts import Degrees, tensor_degrees, train_degrees
from compiler.cost.links import all_reduce, gather, group_link
from compiler.cost.sizes import sizes_of
from compiler.cost.training import Micro
from compiler.cost.workload import GENERATE, TRAIN, Call
from compiler.layout import ModelLayout, generation_layout
from compiler.machine import SINGLE, Engine, Machine, Reached
from compiler.resharding.redistribute import redistribute
from compiler.shapes import ModelShape, parameters
from compiler.weights import WeightLayout
from rlhf_dsl.diagnostics import DiagnosticError

ROOT = Path(__file__).resolve().parents[1]
IDEAL = Reached(1.0, 1.0, 1.0, 1.0)
NO_HOST = Engine(1e-12, 0.0, 0.0)
LLAMA = sizes_of(model_shape("llama-2-7b"), "policy")


def machine(nodes=2, **changes) -> Machine:
    base = Machine("m", nodes, 8, 3e14, 80e9, 2e12, 3e11, 2.5e10, 3e10, 0.0, 0.0, IDEAL, NO_HOST)
    return dataclasses.replace(base, **changes)


# ---- catalogue -------------------------------------------------------------------------------------

@pytest.mark.parametrize("name, billions", [
    ("llama-1-65b", 65.3), ("llama-2-7b", 6.74), ("llama-2-13b", 13.02), ("llama-2-70b", 68.98),
    ("codellama-34b", 33.74), ("codellama-70b", 68.98), ("llama-3.1-8b", 8.03), ("llama-3-8b", 8.03),
    ("ministral-8b", 8.02), ("llama-3-70b", 70.55), ("llama-3.1-405b", 405.9),
    ("llama-3.2-1b", 1.24), ("qwen2.5-0.5b", 0.494), ("qwen2.5-7b", 7.62), ("qwen2.5-32b", 32.8),
    ("qwen2.5-72b", 72.7), ("qwen3-8b", 8.19), ("qwen3-32b", 32.8), ("mistral-7b", 7.24),
    ("mistral-nemo-12b", 12.2), ("mistral-small-24b", 23.6), ("mistral-large-123b", 122.6),
])
def test_shapes_have_the_published_number_of_parameters(name, billions):
    assert parameters(model_shape(name), "policy") / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize("name", model_names())
def test_sizes_count_all_but_norms_and_biases(name):
    shape = model_shape(name)
    for role in ("policy", "value", "scorer"):
        assert sizes_of(shape, role).parameters == pytest.approx(parameters(shape, role), rel=1e-3)


def test_an_unknown_shape_is_a_diagnostic():
    with pytest.raises(DiagnosticError, match="P0112"):
        model_shape("llama-2-8b")


def test_the_cluster_files_that_come_with_the_project():
    names = {path.stem for path in (ROOT / "programs" / "clusters").glob("*.toml")}
    assert names >= {"laptop", "a100-1x8", "a100-16x8", "h100-16x8", "h100-128x8", "mixed"}


@pytest.mark.parametrize("path", sorted((ROOT / "programs" / "clusters").glob("*.toml")), ids=lambda p: p.stem)
def test_cluster_files_are_read(path):
    cluster = read_cluster(path)
    assert cluster.name == path.stem and cluster.devices == sum(m.devices for m in cluster.machines)


def test_a_device_of_the_catalogue(tmp_path):
    text = ('nodes = 1\ndevices_per_node = 2\ndevice = "{}"\n'
            'links = {{ intra_gb_per_s = 1, inter_gb_per_s = 1, latency_us = 1 }}\n')
    (tmp_path / "c.toml").write_text(text.format("h100-80gb"))
    assert read_cluster(tmp_path / "c.toml").machines[0].flops == DEVICES["h100-80gb"].flops
    (tmp_path / "c.toml").write_text(text.format("h100"))
    with pytest.raises(DiagnosticError, match="unknown device `h100`"):
        read_cluster(tmp_path / "c.toml")


def test_pools_have_names_of_their_own(tmp_path):
    pool = ('[[pool]]\nname = "{}"\nnodes = 1\ndevices_per_node = 2\ndevice = "h100-80gb"\n'
            'links = {{ intra_gb_per_s = 1, inter_gb_per_s = 1, latency_us = 1 }}\n')
    (tmp_path / "c.toml").write_text(pool.format("fast") + pool.format("slow"))
    assert [m.name for m in read_cluster(tmp_path / "c.toml").machines] == ["fast", "slow"]
    (tmp_path / "c.toml").write_text(pool.format("fast") + pool.format("fast"))
    with pytest.raises(DiagnosticError, match="two pools have the name `fast`"):
        read_cluster(tmp_path / "c.toml")


# ---- links -----------------------------------------------------------------------------------------

def test_a_ring_moves_each_part_once_around():
    link = group_link(machine(), 8, 1)
    assert link.bandwidth == 3e11
    assert gather(link, 8, 8e9) == pytest.approx(7e9 / 3e11)
    assert all_reduce(link, 8, 8e9) == pytest.approx(14e9 / 3e11)
    assert gather(link, 1, 8e9) == 0


def test_groups_that_leave_a_node_share_its_cards():
    one = machine(nodes=4)
    assert group_link(one, 8, 4).bandwidth == pytest.approx(2.5e10 / 4)  # 4 rings leave each node
    assert group_link(one, 4, 8).bandwidth == pytest.approx(2.5e10 / 8)
    assert group_link(one, 32, 1).bandwidth == pytest.approx(2.5e10)
    assert group_link(one, 2, 4).bandwidth == 3e11


def test_latency_counts_each_message():
    link = group_link(machine(intra_latency=1e-5), 8, 1)
    assert all_reduce(link, 8, 0.0) == pytest.approx(14e-5)


# ---- one layer -------------------------------------------------------------------------------------

def test_a_long_forward_is_bound_by_computing():
    one = machine(memory_bandwidth=1e18)
    flops = 8192 * (2 * LLAMA.layer + 2 * 4096 * 2048)
    assert layer_forward(one, LLAMA, 1, 8192, 2048).total == pytest.approx(flops / 3e14, rel=1e-6)


def test_decoding_is_bound_by_weights_then_by_the_cache():
    one = machine()
    assert layer_decode(one, LLAMA, 1, 1, 1).total == pytest.approx(2 * LLAMA.layer / 2e12, rel=1e-3)
    cache = 2 * 64 * 4096 * LLAMA.kv / 2e12
    assert layer_decode(one, LLAMA, 1, 64, 4096).total == pytest.approx(2 * LLAMA.layer / 2e12 + cache, rel=1e-6)


def test_the_host_is_waited_for_only_where_it_is_slower():
    slow = machine(engine=Engine(1e-3, 1e-4, 0.0))
    assert layer_decode(slow, LLAMA, 1, 1, 1).total == pytest.approx(1e-3)
    assert layer_decode(slow, LLAMA, 2, 1, 1).total == pytest.approx(1e-3 + 2e-4, rel=1e-3)
    assert layer_forward(slow, LLAMA, 1, 65536, 2048).host == 0
    late = dataclasses.replace(slow, engine=Engine(1e-3, 1e-4, 0.0, ahead=False))
    assert layer_forward(late, LLAMA, 1, 65536, 2048).host == 1e-3


# ---- training --------------------------------------------------------------------------------------

CALL = Call("m", TRAIN, 256, 1024, 1024, minibatches=4)


def test_the_bubble_of_a_pipeline():
    one = machine(node=1e18, intra=1e18, memory_bandwidth=1e18)
    flat = training.passes_time(one, LLAMA, Degrees(1, 1, 4), 16, Micro(1, False), 2048)
    piped = training.passes_time(one, LLAMA, Degrees(1, 4, 1), 64, Micro(1, False), 2048)
    head = 3 * 64 * 2048 * LLAMA.head_flops / 3e14
    assert piped.bubble / piped.compute == pytest.approx(3 / 64)
    assert piped.compute - head == pytest.approx(flat.compute - head / 4, rel=1e-6)


def test_recomputing_costs_a_forward():
    one = machine(memory_bandwidth=1e18)
    times = [training.passes_time(one, LLAMA, Degrees(1, 1, 1), 64, Micro(1, r), 2048).compute for r in (False, True)]
    head = 3 * 64 * 2048 * LLAMA.head_flops / 3e14
    assert (times[1] - head) / (times[0] - head) == pytest.approx(4 / 3)


def test_states_take_eighteen_bytes_a_parameter():
    degrees = Degrees(1, 1, 1)
    held = training.weight_bytes(machine(), LLAMA, degrees) + training.gradient_bytes(machine(), LLAMA, degrees)
    assert held + training.state_bytes(machine(), LLAMA, degrees) == 18 * LLAMA.parameters
    assert training.state_bytes(machine(), LLAMA, Degrees(1, 1, 4)) == 3 * LLAMA.parameters
    assert training.state_bytes(machine(storage=SINGLE), LLAMA, Degrees(1, 1, 4)) == 8 * LLAMA.parameters


def test_activations_shrink_with_recomputing_and_tensor_parallelism():
    def size(tp: int, recompute: bool) -> float:
        return training.activation_bytes(machine(), LLAMA, Degrees(tp, 1, 1), CALL, Micro(4, recompute))

    assert size(1, True) < size(1, False) / 4
    assert size(8, False) == pytest.approx(size(1, False) / 8)


def test_gradients_cross_nodes_once_a_step():
    ring = LLAMA.held(8, 1) / 2 / (2.5e10 / 8)
    assert training.step_time(machine(), LLAMA, Degrees(8, 1, 2)).gradients == pytest.approx((4 + 2) * ring)
    whole = training.step_time(machine(storage=SINGLE), LLAMA, Degrees(8, 1, 2))
    assert whole.gradients == pytest.approx((4 + 4) * ring)
    assert whole.optimizer == pytest.approx((4 + 2 * 8 + 4) * LLAMA.held(8, 1) / 2e12)


def test_training_is_its_passes_and_steps():
    one, degrees, micro = machine(), Degrees(2, 2, 2), Micro(2, True)
    once = training.passes_time(one, LLAMA, degrees, 32, micro, 2048).total
    step = training.step_time(one, LLAMA, degrees).total
    assert training.train_time(one, LLAMA, degrees, CALL, micro) == pytest.approx(4 * (once + step))
    twice = dataclasses.replace(CALL, epochs=2)
    assert training.train_time(one, LLAMA, degrees, twice, micro) == pytest.approx(8 * (once + step))


# ---- generation ------------------------------------------------------------------------------------

def test_the_cache_of_a_token():
    assert LLAMA.cached(1) == 2 * 32 * 4096
    grouped = sizes_of(model_shape("llama-2-70b"), "policy")
    assert grouped.cached(8) == grouped.cached(16) == grouped.cached(1) / 8


def test_waves_repeat_the_reading_of_weights():
    one, call = machine(), Call("m", GENERATE, 64, 128, 512)
    all_at_once, two = (generation.generate_time(one, LLAMA, Degrees(1, 1, 1), call, n).decode for n in (64, 32))
    head = 2 * LLAMA.head / 2e12
    assert two - all_at_once == pytest.approx(512 * (32 * 2 * LLAMA.layer / 2e12 + head), rel=1e-3)


def decoding(one: Machine, call: Call, sequences: int) -> float:
    return generation.generate_time(one, LLAMA, Degrees(1, 1, 1), call, sequences).decode


def test_the_tail_of_the_lengths_is_waited_for():
    """Rows that have ended are not read for: twice the steps, less than twice the seconds. No tail, no difference."""
    one, call = machine(), Call("m", GENERATE, 64, 128, 512)
    times = [decoding(one, dataclasses.replace(call, longest=longest), 64) for longest in (0, 512, 1024, 4096)]
    weights = 2 * (32 * LLAMA.layer + LLAMA.head) / 2e12
    assert times[0] == times[1]
    assert times[0] + 512 * weights < times[2] < 2 * times[0]
    assert times[3] > 4096 * weights


def test_a_tail_keeps_the_mean():
    """Where keys and values alone cost, all tokens of all lengths are as many as those of the mean."""
    one = machine(memory_bandwidth=1e18, flops=1e12)
    call = Call("m", GENERATE, 64, 1e6, 512)  # a long context, of which the response is a small part
    times = [decoding(one, dataclasses.replace(call, longest=longest), 64) for longest in (512, 1024)]
    assert times[1] == pytest.approx(times[0], rel=0.02)


def test_samples_of_a_prompt_share_its_pass():
    one, call = machine(), Call("m", GENERATE, 64, 1024, 128)
    alone, shared = (generation.generate_time(one, LLAMA, Degrees(1, 1, 1), c, 64)
                     for c in (call, dataclasses.replace(call, samples=8)))
    assert shared.prefill == pytest.approx(alone.prefill / 8, rel=0.05) and shared.decode == alone.decode


def test_rows_enter_for_those_that_end():
    """Two waves: the first takes the mean, the last waits for the longest."""
    one, call = machine(), Call("m", GENERATE, 64, 128, 512, longest=1024)
    both, last = (decoding(one, dataclasses.replace(call, rows=rows), 32) for rows in (64, 32))
    assert both - last == pytest.approx(decoding(one, dataclasses.replace(call, rows=32, longest=0), 32))


@pytest.mark.parametrize("train, tp", [((4, 1, 1), 2), ((4, 2, 1), 2), ((2, 2, 2), 2), ((4, 1, 2), 1), ((2, 1, 1), 2)])
def test_transition_bytes_are_those_of_the_move_that_is_planned(train, tp):
    """Up to what the estimate leaves out: norms, and ends that only some stages hold."""
    shape = ModelShape("llama", 256, 16, 8, 8, 32, 704, 512)
    degrees = Degrees(*train)
    layout = ModelLayout(tuple(range(degrees.devices)), *train)
    source, target = WeightLayout(shape, "policy", layout, "megatron"), WeightLayout(
        shape, "policy", generation_layout(layout, tp), "torch")
    planned = redistribute(source, target)
    mean = 2 * planned.total_bytes / 4 / degrees.devices  # the plan's tensors have 4 bytes an element
    estimate = transition.transition_bytes(sizes_of(shape, "policy"), degrees, Degrees(tp, 1, degrees.devices // tp))
    assert mean == pytest.approx(estimate, rel=0.06, abs=1e5)


# ---- degrees ---------------------------------------------------------------------------------------

def test_degrees_divide_the_model_and_stay_in_a_node():
    qwen = sizes_of(model_shape("qwen2.5-7b"), "policy")  # 28 heads, 4 key/value heads
    assert tensor_degrees(machine(), qwen, 16) == (1, 2, 4)
    for degrees in train_degrees(machine(), qwen, 16):
        assert degrees.devices == 16 and 28 % degrees.pp == 0
    assert 16 in tensor_degrees(machine(), LLAMA, 16, across=True)

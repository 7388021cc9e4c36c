"""This machine as a cluster: rates out of what processors say of themselves, the same at each reading."""

from __future__ import annotations

import pytest

from compiler import local
from compiler.local import core_flops, local_cluster

XEON = {"vendor_id": "GenuineIntel", "cpu family": "6", "flags": "fpu sse2 avx fma avx2 avx512f",
        "model name": "Intel(R) Xeon(R) Platinum 8375C CPU @ 2.90GHz", "bogomips": "5800.0"}
ZEN_4 = {"vendor_id": "AuthenticAMD", "cpu family": "25", "flags": "fpu sse2 avx fma avx2 avx512f",
         "model name": "AMD EPYC", "bogomips": "5192.27"}
GRAVITON = {"Features": "fp asimd evtstrm", "BogoMIPS": "2100.00", "CPU architecture": "8"}


@pytest.fixture(autouse=True)
def no_frequency_files(monkeypatch):
    monkeypatch.setattr(local, "_kilohertz", lambda path: 0.0)


@pytest.mark.parametrize("processor, gflops", [
    (XEON, 64 * 2.9), (ZEN_4, 32 * 2.6), (ZEN_4 | {"cpu family": "26"}, 64 * 2.6),
    (XEON | {"flags": "fpu sse2 avx fma avx2"}, 32 * 2.9), (XEON | {"flags": "fpu sse2 avx"}, 16 * 2.9),
    (XEON | {"flags": "fpu sse2", "model name": "?"}, 8 * 2.9), (GRAVITON, 16 * 2.5), ({}, 16 * 2.5),
])
def test_a_core_computes_what_its_vectors_do_in_a_cycle(processor, gflops):
    assert core_flops(processor) == pytest.approx(gflops * 1e9)


def test_the_frequency_of_the_moment_does_not_count():
    assert core_flops(ZEN_4 | {"cpu MHz": "1200.0"}) == core_flops(ZEN_4 | {"cpu MHz": "3700.0"})


def test_the_nominal_frequency_goes_before_the_highest(monkeypatch):
    monkeypatch.setattr(local, "_kilohertz", {local.NOMINAL: 2.1e9, local.HIGHEST: 3.9e9}.get)
    assert core_flops(XEON) == 64 * 2.1e9
    monkeypatch.setattr(local, "_kilohertz", {local.NOMINAL: 0.0, local.HIGHEST: 3.3e9}.get)
    assert core_flops(GRAVITON) == 16 * 3.3e9


def test_the_machine_is_the_same_at_each_reading():
    assert local_cluster() == local_cluster() and local_cluster().digest == local_cluster().digest
    assert local_cluster().is_local and local_cluster().device.flops > 0


def test_a_machine_without_proc(monkeypatch):
    monkeypatch.setattr(local.Path, "read_text", lambda *args, **options: (_ for _ in ()).throw(OSError()))
    assert local_cluster().device.flops == local.USUAL_FLOP * local.USUAL_HZ

"""Groups take what lies in the host's memory by gloo, what lies on GPUs by NCCL.

There is no GPU here: torch's fake backend takes the place of NCCL in `BACKENDS`; the groups, and gloo, are real.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend "fake"

from compiler.layout import ModelLayout
from runtime import meshes
from runtime.meshes import Job, Mesh, backend_of
from runtime.reducers import DistReducer
from runtime.world import DistWorld

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(params=[CPU, CUDA], ids=str)
def job(request, monkeypatch):
    """The only rank of a job, with its default group."""
    monkeypatch.setitem(meshes.BACKENDS, "cuda", "fake")
    dist.init_process_group(backend_of("cpu", request.param.type), store=dist.HashStore(), rank=0, world_size=1)
    yield Job(0, 1, request.param)
    dist.destroy_process_group()


def carriers(group: dist.ProcessGroup) -> dict[str, str]:
    """By device, what takes its tensors."""
    return {device.type: group._get_backend(device).name() for device in group._device_types}


def test_each_device_has_its_backend():
    assert backend_of("cpu", "cuda") == "cpu:gloo,cuda:nccl"
    assert backend_of("cpu", "cpu") == "cpu:gloo" and backend_of("cuda") == "cuda:nccl"


def test_rows_travel_by_gloo_on_a_job_with_gpus_too(job):
    assert carriers(dist.group.WORLD) == {"cpu": "gloo"} | ({"cuda": "fake"} if job.device == CUDA else {})
    assert DistWorld(None, 0, 1).exchange([torch.ones(3)], [3])[0].tolist() == [1, 1, 1]
    assert DistWorld(None, 0, 1).all_gather(torch.tensor([True]), [1]).tolist() == [True]
    assert DistReducer().all_reduce(torch.ones(2), "sum").tolist() == [1, 1]


def test_groups_of_engines_take_each_tensor_by_its_device(job):
    layout = ModelLayout((0,))
    mesh = Mesh(job, [layout])
    groups = mesh.groups(layout)
    for group in (groups.tp, groups.pp, groups.dp, groups.replica, groups.ends, groups.alone, mesh.group((0,))):
        assert carriers(group) == {"cpu": "gloo"} | ({"cuda": "fake"} if job.device == CUDA else {})


def test_what_no_backend_is_for_is_refused(job):
    layout = ModelLayout((0,))
    group = Mesh(job, [layout]).groups(layout).tp
    with pytest.raises(RuntimeError, match="meta"):
        group._get_backend(torch.device("meta"))


def test_rows_do_not_leave_from_a_device():
    """Who receives them waits for them in the host's memory."""
    with pytest.raises(ValueError, match="from the host's memory"):
        DistWorld(None, 0, 2).exchange([torch.zeros(0), torch.zeros(2, device="meta")], [0, 0])

"""Collectives of groups and meshes on real gloo ranks, and the same methods where a group has one rank."""

from __future__ import annotations

import pytest
import torch

from helix.comm.group import Group
from helix.comm.mesh import build_mesh, planning_mesh
from helix.comm.world import single_world
from helix.errors import LayoutError
from helix.layout import Layout
from tests.parallel import comm_jobs
from tests.ranks import RankPool

CPU = torch.device("cpu")
LAYOUTS = {
    2: [Layout(kvp=2, tpf=2), Layout(tpa=2, tpf=1, ep=2)],
    3: [Layout(kvp=3, tpf=1, ep=3)],
    4: [Layout(kvp=2, tpa=2, tpf=4), Layout(kvp=4, tpf=2, ep=2)],
    6: [Layout(kvp=3, tpa=2, tpf=2, ep=3), Layout(kvp=2, tpa=3, tpf=3, ep=2)],
}


@pytest.mark.parametrize("num_ranks", LAYOUTS)
def test_every_collective_in_every_group(ranks: RankPool, num_ranks: int) -> None:
    results = ranks.run(num_ranks, comm_jobs.check_collectives, LAYOUTS[num_ranks])
    assert len(results) == num_ranks
    for sent in results:
        assert set(sent) == {"world", "kvp", "tpf", "ep"}
        for axis in ("kvp", "tpf", "ep"):
            alone = [getattr(layout, axis) == 1 for layout in LAYOUTS[num_ranks]]
            assert [not counted for counted in sent[axis]] == alone


def test_one_rank_takes_the_same_path_without_traffic() -> None:
    world = single_world(CPU)
    sent = comm_jobs.check_collectives(world, [Layout()])
    assert sent == {"world": [{}], "kvp": [{}], "tpf": [{}], "ep": [{}]}
    assert world.group.traffic.calls == {}
    assert comm_jobs.labels_of_beats(world) == []
    world.close()
    world.close()


def test_one_rank_copies_and_does_not_alias() -> None:
    group = Group("kvp", (7,), 7)
    x = torch.arange(6.0).view(1, 6)
    outputs = (
        group.all_gather(torch.empty(1, 1, 6), x),
        group.reduce_scatter(torch.empty(6), x),
        group.all_to_all(torch.empty(1, 6), x),
        group.all_to_all_uneven(torch.empty(1, 6), x, [1], [1]),
    )
    want = x.clone()
    x.fill_(comm_jobs.MARK)
    assert all(torch.equal(out.flatten(), want.flatten()) for out in outputs)


def test_monitor_hears_of_each_collective(ranks: RankPool) -> None:
    names = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_to_all", "broadcast"]
    for labels in ranks.run(2, comm_jobs.labels_of_beats):
        assert labels == [f"{name} over ring" for name in names]


def test_worlds_follow_one_another_in_the_same_processes(ranks: RankPool) -> None:
    pids: list[int] = []
    for size, twice in ((3, False), (2, True), (3, True), (2, False)):
        results = ranks.run(size, comm_jobs.rank_sum_and_pid, twice)
        assert [total for total, _ in results] == [size * (size + 1) / 2] * size
        pids = pids or [pid for _, pid in results]
        assert [pid for _, pid in results] == pids[:size]
    assert len(set(pids)) == 3


@pytest.mark.parametrize("layout", [Layout(kvp=3, tpf=3), Layout(), Layout(kvp=2, tpa=2, tpf=4)], ids=str)
def test_mesh_needs_the_ranks_of_the_layout(ranks: RankPool, layout: Layout) -> None:
    for message, total in ranks.run(2, comm_jobs.refusal_of, layout):
        assert message.startswith(f"layout {layout} needs {layout.num_ranks} ranks, but 2 were started")
        assert total == 2


def test_mesh_of_two_ranks_on_one() -> None:
    with pytest.raises(LayoutError, match="needs 2 ranks, but 1 were started"):
        build_mesh(Layout(kvp=2, tpf=2), single_world(CPU))


def test_subgroup_that_leaves_this_rank_out() -> None:
    with pytest.raises(ValueError, match="rank 0 stands in no odd group"):
        single_world(CPU).subgroup("odd", ((1,), (2,)))


def test_planning_mesh_stands_where_the_rank_would() -> None:
    layout = Layout(kvp=3, tpa=2, tpf=2, ep=3)
    for rank in range(6):
        mesh = planning_mesh(layout, rank)
        assert mesh.coords == layout.coords(rank)
        assert mesh.device.type == "meta"
        assert {(group.size, group.ranks) for group in (mesh.world, mesh.kvp, mesh.tpf, mesh.ep)} == {(1, (rank,))}


def test_symmetric_memory_is_refused_with_the_reason(ranks: RankPool) -> None:
    for message in ranks.run(2, comm_jobs.refusal_of_symmetric):
        assert message == "comm.transport=symmetric: the ranks are not on GPUs; use auto or collective"

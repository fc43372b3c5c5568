"""Which node this is, where the nodes meet, and free ports."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest
from handmade_plans import make_plan

from trainkit.errors import MachineError
from trainkit.launch_plan.model import NodeGroup, Plan, Topology
from trainkit.runner.rendezvous import free_port, group_of, local_address, node_place
from trainkit.schedulers.base import Place


def plan_of(*counts: int) -> Plan:
    groups = tuple(NodeGroup(count, 2, ("cpu", "cpu")) for count in counts)
    return replace(make_plan(("true",), "runs", ranks=2), topology=Topology("cpu", groups))


def test_one_node_is_node_0_whatever_the_scheduler_says() -> None:
    assert node_place(plan_of(1), None, {"JOB_COMPLETION_INDEX": "5"}) == Place(0)


@pytest.mark.parametrize("name", ["JOB_COMPLETION_INDEX", "PBS_NODENUM", "NODE_RANK"])
def test_the_schedulers_variable_numbers_the_node(name: str) -> None:
    assert node_place(plan_of(4), None, {name: "3"}).node == 3
    assert node_place(plan_of(4), 1, {name: "3"}).node == 1


def test_several_nodes_without_a_rank_are_refused_with_a_way_out() -> None:
    for environ in ({}, {"SLURM_JOB_ID": "7", "SLURM_NODEID": "0"}):  # in a batch script every process is on node 0
        with pytest.raises(MachineError) as caught:
            node_place(plan_of(4), None, environ)
        assert "--node-rank" in caught.value.diagnostics[0].hint


def test_a_rank_beyond_the_nodes_is_refused() -> None:
    with pytest.raises(MachineError, match="node rank 4 does not fit"):
        node_place(plan_of(4), 4, {})


def test_groups_are_numbered_through() -> None:
    assert [group_of(plan_of(1, 2), rank) for rank in range(3)] == [0, 1, 1]


def test_a_port_is_free_and_below_what_the_kernel_hands_out() -> None:
    port = free_port()
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))
        assert 1024 < port < 60000
    assert len({free_port() for _ in range(20)}) > 10


def test_the_local_address_is_the_one_that_leads_to_node_0() -> None:
    assert local_address("127.0.0.1", 2) == "127.0.0.1"
    with pytest.raises(MachineError, match=r"no-such-host\.invalid"):
        local_address("no-such-host.invalid", 2)

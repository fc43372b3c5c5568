"""Ports that ranks connect through, names that they look up, and collectives: whether two processes reduce a tensor."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import socket
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from trainkit.doctor.all_reduce import LOOPBACK, unreachable
from trainkit.doctor.check import NEEDS, Finding, Host, Level, Target, ok, skipped
from trainkit.errors import MachineError
from trainkit.machine.host import text
from trainkit.machine.selection import allocation
from trainkit.planner.env import LEAKS
from trainkit.runner.rendezvous import free_port, why_port_is_taken

RANGE = "/proc/sys/net/ipv4/ip_local_port_range"
FEW, FEWEST = 1000, 50  # ranks of one machine connect to each other pairwise, for every process group
NAMES_LIMIT = 5.0
COLLECTIVES_LIMIT = 16.0
SECONDS = 8.0  # for the ranks; importing torch comes on top
FIX: Mapping[str, tuple[str, ...]] = {
    "gloo": (
        "export GLOO_SOCKET_IFNAME=lo      # one machine: does it help? then the host name leads to a wrong address",
        'getent hosts "$(hostname)"      # gloo listens on the address of the machine\'s own name',
    ),
    "nccl": (
        "export NCCL_DEBUG=INFO      # then run the doctor again, or the recipe: NCCL says where it stops",
        "export NCCL_P2P_DISABLE=1      # does it help? then the GPUs cannot reach each other directly (IOMMU, ACS)",
    ),
}
# A name service that hangs can hold a process for minutes: it is asked by one that can be killed.
ASK = """
import json, socket, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = sorted({entry[4][0] for entry in socket.getaddrinfo(name, None)})
    except OSError as error:
        found[name] = str(error.strerror or error)
print(json.dumps(found))
"""


def ports(host: Host, target: Target) -> list[Finding]:
    """What is taken or scarce, else which port would be used."""
    plan = target.plan
    if plan and not target.several and plan.rendezvous == "auto":
        return [skipped(NEEDS["several"])]
    first, last = map(int, (text(host.under(RANGE)) or "32768 60999").split())  # else Linux's default
    found: list[Finding] = []
    if plan and plan.rendezvous != "auto" and target.node_rank == 0:
        found += _rendezvous(host, plan.rendezvous, first, last)
    if last - first < FEW:
        fix = ('sudo sysctl -w net.ipv4.ip_local_port_range="32768 60999"',)
        evidence = (f"{host.under(RANGE)}: {first} to {last}",)
        level: Level = "problem" if last - first < FEWEST else "warning"
        what = f"only {max(last - first + 1, 0)} ports for outgoing connections"
        found.append(Finding(level, what, evidence, fix))
    # To say which port is free would hide what was found wrong with another.
    if not any(finding.level == "problem" for finding in found):
        try:
            found.append(ok(f"port {free_port()} is one that is free"))
        except MachineError as error:
            found.append(Finding("problem", str(error), (), ("ss -ltnp      # who listens",)))
    return found


def _rendezvous(host: Host, address: str, first: int, last: int) -> Iterator[Finding]:
    """The recipe's own port, where node 0 is this machine. first, last: of the ports of outgoing connections."""
    node, _, number = address.rpartition(":")
    port = int(number)
    if is_here(node.strip("[]"), host.facts.hostname) and (why := why_port_is_taken(port)):
        look = (
            f"ss -ltnp 'sport = :{port}'      # who listens there",
            f"trainkit run RECIPE nodes.rendezvous={node}:PORT",
        )
        yield Finding("problem", f"port {port} of nodes.rendezvous cannot be used: {why}", (address,), look)
    if first <= port <= last:
        what = "an outgoing connection may be given the rendezvous port before it is used"
        evidence = (f"nodes.rendezvous {address}", f"{host.under(RANGE)}: {first} to {last}")
        lower = f"trainkit run RECIPE nodes.rendezvous={node}:{max(first - 1000, 1024)}"
        yield Finding("note", what, evidence, (lower,))


def is_here(node: str, own_name: str) -> bool:
    """Whether a host is this machine, as far as can be known without a name service."""
    if node in ("localhost", own_name):
        return True
    with contextlib.suppress(ValueError, OSError):  # a name, or the address of another machine
        family = socket.AF_INET6 if ipaddress.ip_address(node).version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((node, 0))
        return True
    return False


def host_names(host: Host, target: Target) -> list[Finding]:
    """Each name that does not resolve, and a loopback that does not answer."""
    own, plan, found = host.facts.hostname, target.plan, []
    node_0 = plan.rendezvous.rpartition(":")[0].strip("[]") if plan and plan.rendezvous != "auto" else ""
    names = [name for name in dict.fromkeys((own, "localhost", node_0)) if name]
    done = host.run((host.facts.executable, "-c", ASK, *names), NAMES_LIMIT)
    if not done.fine:
        what = f"the name service does not answer for {' and '.join(names)}"
        look = 'getent hosts "$(hostname)"      # should answer at once'
        found.append(Finding("problem", what, (done.said,), (look,)))
    for name, answer in json.loads(done.output).items() if done.fine else ():
        if not isinstance(answer, str):
            continue
        what = f"node 0 is called {name}, and that does not resolve here"
        fix = f"getent hosts {name}      # then set nodes.rendezvous to an address, or add it to /etc/hosts"
        if name in (own, "localhost"):  # gloo listens on the address of the machine's own name (ProcessGroupGloo)
            what = f"the name {name} does not resolve; gloo looks itself up by it"
            fix = f"echo '127.0.0.1 {name}' | sudo tee -a /etc/hosts"
        found.append(Finding("problem", what, (answer,), (fix,)))
    if why := unreachable():
        evidence, up = (f"{LOOPBACK}: {why}",), ("sudo ip link set lo up",)
        found.append(Finding("problem", "the loopback interface does not answer", evidence, up))
    return found or [ok("this machine's name and localhost resolve, the loopback interface answers")]


def collectives(host: Host, target: Target) -> list[Finding]:
    """One finding for each backend that would be used: gloo, NCCL where there are two GPUs."""
    plan = target.plan
    if "torch" not in host.facts.packages:
        return [skipped("torch is not installed")]
    several = len(allocation(host.facts)) > 1
    # gloo also for a plan with GPUs that are not here: the network is then all that can be tried
    gloo = plan is None or plan.topology.device != "cuda" or not several
    backends = {"gloo": gloo, "nccl": target.cuda and several}
    return [_tried(host, target, backend) for backend, used in backends.items() if used]


def _tried(host: Host, target: Target, backend: str) -> Finding:
    # -P: a torch.py or random.py in the working folder must not be imported.
    program = (host.facts.executable, "-P", "-m", "trainkit.doctor.all_reduce", backend, f"{SECONDS:g}")
    done = host.run(program, COLLECTIVES_LIMIT, environ=_environment(host, target))
    try:
        answer = json.loads(done.output)
    except ValueError:
        level: Level = "warning" if done.code is None else "problem"  # a slow disk may be all that is wrong
        fix = (f"{host.python} -c 'import torch.distributed'", "ip address show lo")
        return Finding(level, f"{backend}: the trial could not be made", (done.said,), fix)
    if answer["fine"]:
        return ok(f"2 processes reduced a tensor with {backend} in {answer['seconds']:.1f} s")
    what = f"2 processes on this machine cannot reduce a tensor with {backend}"
    reached = [stages[-1] if stages else "has not reached the store" for stages in answer["stages"]]
    each = "; ".join(f"rank {rank} {stage}" for rank, stage in enumerate(reached))
    summary = f"each rank {reached[0]}" if len(set(reached)) == 1 else each
    evidence = (summary, f"after {answer['seconds']:.1f} s of at most {SECONDS:g} s")
    names = sorted(name for name in host.environ if name.startswith(f"{backend.upper()}_"))
    unset = (f"unset {' '.join(names)}",) if names else ()  # the backend's own settings may be what is wrong
    return Finding("problem", what, evidence, (*unset, *FIX[backend]))


def _environment(host: Host, target: Target) -> dict[str, str]:
    """As a rank of trainkit's would have it: without what plans remove, with what the recipe sets."""
    leaks = {name for name in host.environ for pattern in LEAKS if fnmatchcase(name, pattern)}
    kept = {name: value for name, value in host.environ.items() if name not in leaks}
    own = {name: str(value) for name, value in target.recipe.env.items()} if target.recipe else {}
    if target.plan:  # the same GPUs
        own |= {name: str(value) for name, value in target.plan.environment.set if name.startswith("CUDA_")}
    return kept | own | {"OMP_NUM_THREADS": "1"}

"""Machines without a scheduler: the words of ssh, and what starts a node on each. Pure; the client runs commands.

Standard input of each ssh is held open until the run has begun, and is the only tie: what comes over it are orders, and
its end is the end of the node. A terminal (-tt) would end it as well, but echo what is sent, mix output and errors, and
hang up on a run that goes on.
"""

from __future__ import annotations

import ipaddress
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from trainkit.errors import Diagnostic, MachineError
from trainkit.launch_plan.context import Context
from trainkit.launch_plan.model import Variable
from trainkit.launch_plan.provenance import SourcedJob, Token, setup_lines, sourced_job, token
from trainkit.recipe.schema import Recipe
from trainkit.recipe.schema import Ssh as Section
from trainkit.recipe.schema.cluster import Cluster
from trainkit.schedulers.base import Job, Output, Query, RefusedError, Scheduler

SCRIPT = "node.sh"
ALIVE_SECONDS = 10  # between ssh's questions whether the machine still answers; after three without an answer it ends
# Options of ssh(1) that may be given, by whether a word follows them.
WITH_VALUE, ALONE = "BbcDEeFIiJLlmPpRw", "46AaCgKkqvXxYy"
SET_HERE = {
    **dict.fromkeys("tTfnNsWMSO", "trainkit holds the standard input of ssh, and has a connection of its own"),
    **dict.fromkeys("GVQ", "it starts nothing"),
}
OWN_OPTIONS = (
    *("batchmode", "controlmaster", "controlpath", "requesttty", "remotecommand", "stdinnull", "sessiontype"),
    "forkafterauthentication",
)
# What runs no program, loads no library and reads no file of options, as a dry run is to. All else may: ssh learns more
# such words with each version. So may a value that is more than one word to the shell of a proxy.
HARMLESS = "46AaBbCcDeiJKkLlmPpqRvwXxYy"
HARMLESS_OPTIONS = (
    *("addressfamily", "bindaddress", "bindinterface", "certificatefile", "checkhostip", "ciphers", "compression"),
    *("connectionattempts", "connecttimeout", "fingerprinthash", "forwardagent", "globalknownhostsfile"),
    *("gssapiauthentication", "gssapidelegatecredentials", "hashknownhosts", "hostbasedauthentication"),
    *("hostkeyalgorithms", "hostkeyalias", "hostname", "identitiesonly", "identityagent", "identityfile", "ipqos"),
    *("kbdinteractiveauthentication", "kexalgorithms", "loglevel", "macs", "numberofpasswordprompts"),
    *("passwordauthentication", "port", "preferredauthentications", "proxyjump", "pubkeyacceptedalgorithms"),
    *("pubkeyauthentication", "rekeylimit", "requiredrsasize", "serveralivecountmax", "serveraliveinterval"),
    *("stricthostkeychecking", "tcpkeepalive", "updatehostkeys", "user", "userknownhostsfile", "verifyhostkeydns"),
    "visualhostkey",
)
PLAIN = re.compile(r"(?!-)[\w.,:@/~+^=%*!\[\]-]*")
SET = re.compile(r"[ \t]*([A-Za-z0-9]+)(?:[ \t]*=[ \t]*|[ \t]+|$)(.*)")  # ssh knows a name in quotes, too
HELD = "until the run has begun it lasts as long as this input is open"


class Ssh(Scheduler):
    """Nobody queues the run: `trainkit submit` starts it on all hosts, and leaves it to them."""

    kind, title = "ssh", "ssh"
    job_id = r"[1-9]\d{0,9}"  # of the process that has started the run
    starts_nodes: ClassVar[bool] = True

    def problems(self, context: Context) -> Iterator[Diagnostic]:
        section, error, nodes = section_of(context.recipe), context.resolved.error, context.recipe.nodes.count
        if not section.hosts:
            yield error("cluster.hosts", "cluster.hosts names no machine", "hosts: [gpu1, gpu2], as ssh knows them")
            return
        for position, host in enumerate(section.hosts):
            if bare(host) in [bare(each) for each in section.hosts[:position]]:
                what = f"cluster.hosts names {bare(host)} twice"
                why = "trainkit is started once on each machine, and starts the ranks itself"
                hint = "name it once; nodes.processes_per_node says how many ranks it has"
                yield error(f"cluster.hosts.{position}", what, hint, why=why)
        if nodes != len(section.hosts):
            what = f"nodes.count is {nodes}, and cluster.hosts names {len(section.hosts)}"
            yield error("nodes.count", what, "leave nodes.count out, or name as many hosts")
        if (
            len(section.hosts) > 1
            and context.recipe.nodes.rendezvous == "auto"
            and _is_loopback(bare(section.hosts[0]))
        ):
            what = f"the first of cluster.hosts is {section.hosts[0]}, which is another machine for each of the others"
            yield error("cluster.hosts.0", what, "name it as the others reach it, or set nodes.rendezvous to host:port")
        if found := _wrong_option(section.options):
            yield error("cluster.options", *found)

    def job(self, context: Context) -> SourcedJob:
        """The script of a node, and the words of ssh before host and script."""
        section = section_of(context.recipe)
        folder = section.workdir
        change = f"cd {shlex.quote(folder)}" if folder else 'cd "$3"'
        rule = "" if folder else "the folder where it is submitted"
        lines = [
            token("# bash -l node.sh NODE HOSTS FOLDER", rule="what ssh starts on each host, by its login shell"),
            token(f"{change} || exit 4", keys=("cluster.workdir",) if folder else (), rule=rule),
            token("exec 3<&0 </dev/null", rule=HELD),
            *setup_lines(section.setup, token("exit 4", rule="no node starts the run, and who submits it is told why")),
        ]
        python = shlex.quote(context.facts.executable)
        rule = "the run on this machine; until it has begun it ends with its input"
        node = f"exec {python} -P -m trainkit job node "
        lines.append(token(node, Variable.RUN_DIR, ' --held --node "$1" --hosts "$2" <&3 3<&-', rule=rule))
        hosts = tuple(section.hosts)
        return sourced_job(
            self.kind, SCRIPT, lines, [*_words(section)], (), start_seconds=section.start_seconds, hosts=hosts
        )

    def attach(
        self,
        job: Job,
        host: str,
        argv: Sequence[str],
        *,
        terminal: bool,
        section: Callable[[], Cluster],
        environ: Mapping[str, str],
    ) -> tuple[tuple[str, ...], Mapping[str, str]]:
        found = section()
        if not isinstance(found, Section):
            raise MachineError(f"the recipe of the run names no hosts: cluster.kind is {found.kind}")
        words = [word for word in command(found) if word != "-T"]
        return (*words, "-tt" if terminal else "-T", "--", host, shlex.join(argv)), environ

    def signal_node(self, host: str, argv: Sequence[str], section: Cluster) -> Query[bool]:
        if not isinstance(section, Section):
            raise MachineError(f"the recipe of the run names no hosts: cluster.kind is {section.kind}")

        def read(output: Output) -> bool:
            if output.code not in (0, 1):
                raise RefusedError(said(output) or f"exit code {output.code}")
            return output.code == 0

        return Query(node_argv(command(section), host, f"exec {shlex.join(argv)} </dev/null", ()), read)


SCHEDULER = Ssh()


def _wrong_option(words: Sequence[str]) -> tuple[str, str] | None:
    """What is wrong with words for ssh, and what to do instead."""
    for word, letter, value in _options(words):
        if not word.startswith("-") or not letter or letter not in WITH_VALUE + ALONE + "o" + "".join(SET_HERE):
            return f"cluster.options has {word!r}, which is no option of ssh", "the hosts stand in cluster.hosts"
        if letter in SET_HERE:
            return f"cluster.options has -{letter}: {SET_HERE[letter]}", "leave it out"
        if letter in ALONE and value:
            return f"cluster.options has {word!r}", f"write -{letter} alone, and each option as a word of its own"
        if letter in WITH_VALUE + "o" and not value:
            return f"cluster.options has -{letter} without its value", f"write it behind: -{letter} VALUE, as two words"
        name = _named(value)[0].lower()
        if letter == "o" and not name:
            return f"cluster.options has {value!r} behind -o", "write an option and its value: -oPort=2222"
        if letter == "o" and name in OWN_OPTIONS:
            return f"cluster.options sets {name}, which trainkit sets itself", "leave it out"
    return None


def _options(words: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Each option as it is written, its letter, and its value, which may be the next word."""
    rest = iter(words)
    for word in rest:
        letter, value = word[1:2], word[2:]
        if letter and letter in WITH_VALUE + "o" and not value:
            value = next(rest, "")
        yield word, letter, value


def may_run_programs(words: Sequence[str]) -> str:
    """The first of the words by which ssh may run programs of this machine; empty where there is none."""
    for _, letter, value in _options(words):
        name, of_it = _named(value) if letter == "o" else ("", value)
        known = name.lower() in HARMLESS_OPTIONS if letter == "o" else letter in HARMLESS
        if not known or not PLAIN.fullmatch(of_it):
            return f"-{letter} {name}".rstrip()
    return ""


def _named(value: str) -> tuple[str, str]:
    """The name of an option in the value of `-o`, and what it is set to; empty where it is not written plainly."""
    found = SET.fullmatch(value)
    return (found[1], found[2]) if found else ("", "")


def _words(section: Section) -> Iterator[Token]:
    yield token("ssh", rule="reaches a host")
    yield token("-T", rule="a terminal would echo what is sent to the node, and mix output and errors")
    yield token("-oBatchMode=yes", rule="nobody is asked for a password, or whether a key is right: it is an error")
    yield token("-oControlPath=none", rule="a connection of its own, which ends when the run has begun")
    for word in section.options:
        yield token(word, keys=("cluster.options",))
    # ssh takes the first value that it is given for an option (ssh_config(5)): those of the recipe count.
    yield token(f"-oServerAliveInterval={ALIVE_SECONDS}", rule="a machine that is gone is noticed")
    yield token("-oConnectTimeout=20", rule="a machine that does not answer is named soon")


def command(section: Section) -> tuple[str, ...]:
    """The words of ssh before a host."""
    return tuple(str(each.text) for each in _words(section))


def section_of(recipe: Recipe) -> Section:
    assert isinstance(recipe.cluster, Section)
    return recipe.cluster


def bare(host: str) -> str:
    return host.rpartition("@")[2]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def node_argv(ssh: Sequence[str], host: str, script: str, words: Sequence[str]) -> tuple[str, ...]:
    """What runs a script on a host, with words behind it ($1, $2, …), whatever the login shell there is."""
    return (*ssh, "--", host, f"exec bash -lc {shlex.join((script, SCRIPT, *words))}")


@dataclass(frozen=True, slots=True)
class Address:
    """Where ssh goes for a host, by its configuration."""

    name: str
    port: str


def address(ssh: Sequence[str], host: str) -> Query[Address]:
    """Asks ssh where it would go; it connects to nothing."""

    def read(output: Output) -> Address:
        known = dict(line.partition(" ")[::2] for line in output.out.splitlines())
        if output.code or "hostname" not in known:
            raise RefusedError(f"{host}: {output.words or 'ssh -G names no address'}")
        return Address(known["hostname"], known.get("port", "22"))

    return Query((*ssh, "-G", "--", host), read)


def version(ssh: Sequence[str], host: str, python: str) -> Query[str]:
    """Asks a host which trainkit it has."""

    def read(output: Output) -> str:
        if output.code:
            raise RefusedError(said(output) or f"exit code {output.code}")
        return output.out.strip().splitlines()[-1]

    return Query(node_argv(ssh, host, f"exec {shlex.quote(python)} -P -m trainkit --version </dev/null", ()), read)


def said(output: Output) -> str:
    """What ssh or the shell there say, in one line."""
    return " ".join(output.words.split())

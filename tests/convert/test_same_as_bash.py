"""What a script starts is what Bash starts of it, or the script is refused; never anything else."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from bash_judge import Start, judged
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.convert.idioms import IDIOMS
from trainkit.convert.command import starts_program
from trainkit.convert.shell.evaluating import Script, Step, evaluate
from trainkit.convert.shell.rewriting import DEFAULT, WHOLE, UnreadError

pytestmark = pytest.mark.cli
ROOT = Path(__file__).parents[2]
# What is refused, and why.
REFUSED = {
    "if py else": "depends on how `python -c",
    "cd missing": "there is no folder",
    "cd missing go on": "there is no folder",
    "xargs": "for each thing that it finds",
    "find exec": "for each thing that it finds",
}
FILES = {
    "x.py": "", "sub/x.py": "", "a.json": "{}", "b.json": "{}", "env.sh": "export FROM_ENV=7\nLOCALV=5\n",
    "hosts": "h1\nh2\n# c\nh3\n", "kv": "# c\nAA=1\nBB=2\n", "r.sh": 'python x.py "$@" $0 $W\nexit 3\n',
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with some files, as on the machine where a script is started."""
    made = tmp_path / "here"
    for name, text in FILES.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text(text)
    (made / "r.sh").chmod(0o755)
    return made


def said(started: Step, environ: Mapping[str, str], folder: Path) -> tuple[str, ...]:
    """A command as a pattern: folder, variables and words, with what the environment has in place of what is open."""

    def settled(text: str) -> str:
        while (made := WHOLE.sub(lambda found: environ.get(found[1]) or value(found), text)) != text:
            text = made
        return re.escape(text.replace(str(folder), "@here")).replace("\\\f", ".+")

    def value(found: re.Match[str]) -> str:
        return "\f" if found[1].startswith("#") else found[2] or ""

    given = {**environ, "PATH": "$PATH"}
    made = {name: WHOLE.sub(lambda found: given.get(found[1]) or value(found), text) for name, text in started.exported}
    added = [f"{name}={settled(text)}" for name, text in sorted(made.items()) if environ.get(name) != text]
    first, *words = map(settled, started.words)
    return started.folder, *added, first.rpartition("/")[2], *words


def told(start: Start) -> tuple[str, ...]:
    """What Bash has started, alike."""
    return start.folder, *(f"{name}={value}" for name, value in start.added), *start.words


@pytest.mark.parametrize("name", IDIOMS)
def test_an_idiom_starts_what_bash_starts(name: str, folder: Path) -> None:
    text, given, own = IDIOMS[name]
    if refused := unlike(text, given, {"HOME": "/home/u", **own}, folder):
        assert REFUSED[name] in refused
    else:
        assert name not in REFUSED


def test_a_file_that_is_not_in_the_folder_that_the_script_has_gone_to_has_no_line(folder: Path) -> None:
    text = "cd sub\nif grep -q h2 hosts; then python x.py there; fi\ngrep -q h2 ../hosts && python x.py above"
    assert not unlike(text, (), {"HOME": "/home/u"}, folder)


@pytest.mark.parametrize("body", ["f", "( f )", "A=$(f)", "f &"])
def test_a_function_that_calls_itself_without_end_is_refused(body: str, folder: Path) -> None:
    why = unlike(f"f() {{ {body}\n}}\nf\nwait\npython x.py", (), {"HOME": "/home/u"}, folder)
    assert re.match("it calls itself|it does not end", why), why


@pytest.mark.parametrize(
    "text",
    [
        "mkdir -p out/a\n[ -d out ] && python x.py",
        "touch q\n[[ -e q ]] && python x.py",
        "rm -rf sub\n[ -f sub/x.py ] || python x.py",
        "mv x.py y.py\n[ -f x.py ] || python y.py",
        "cp x.py y.py\ntest -f y.py && python x.py",
        "echo 5 > n\n[ -s n ] && python x.py",
        "echo a > hosts\nread A < hosts\npython x.py $A",
        "echo A=1 > env.sh\nsource env.sh\npython x.py $A",
        'echo "python x.py" > r2.sh\nbash r2.sh',
        "git clone https://host.org/b.git\n[ -d b ] && python x.py",
        "python x.py --output_dir=out\nif [ -f out/model.bin ]; then python x.py --eval; fi",
        "echo a | tee n\n[ -f n ] && python x.py",
        "touch c.json\npython x.py *.json",
        "rm -rf sub\npython x.py sub/*.py",
    ],
)
def test_what_depends_on_files_that_the_script_changes_is_refused(text: str, folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    script = Script(text, starts_program, "go.sh", here=str(folder), is_folder=os.path.isdir)
    with pytest.raises(UnreadError, match="depends on what"):
        evaluate(script)
    assert sorted(folder.rglob("*")) == before


def unlike(text: str, given: Sequence[str], environ: Mapping[str, str], folder: Path) -> str:
    """Why a script is refused; else asserts that it starts what Bash starts of it."""
    (folder / "go.sh").write_text(text)
    real = [each for each in map(told, judged(["go.sh", *given], folder, environ)) if starts_program(each[1:])]
    before = sorted(folder.rglob("*"))
    script = Script(text, starts_program, "go.sh", given, here=str(folder), environ=environ, is_folder=os.path.isdir)
    try:
        found = evaluate(script)
    except UnreadError as error:
        return error.what
    finally:
        assert sorted(folder.rglob("*")) == before
    ours = [said(each, environ, folder) for each in found.started]
    texts = [text for each in found.started for text in (*each.words, *(value for _, value in each.exported))]
    needed = {name for text in texts for name, default in WHOLE.findall(text) if DEFAULT not in text and name[0] != "#"}
    if missing := needed - environ.keys():
        return f"the recipe asks for {missing}"
    assert len(ours) == len(real), (ours, real)
    for mine, theirs in zip(ours, real, strict=True):
        assert len(mine) == len(theirs) and all(map(re.fullmatch, mine, theirs)), (mine, theirs)
    return ""


@pytest.mark.parametrize("which", [[], pytest.param(["endless"], marks=pytest.mark.campaign)])
def test_no_hostile_script_does_anything(which: list[str], tmp_path: Path) -> None:
    spaces = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--net"]
    spaces += ["--map-root-user"] if os.getuid() else []
    argv = [*spaces, sys.executable, "-m", "tests.convert.hostile", str(tmp_path), *which]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    if done.stderr.startswith("unshare: "):
        pytest.skip(f"this machine grants no namespaces: {done.stderr}")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["wrong"] == {}
    assert found["tried"] > (10 if which else 150)


# Pieces of scripts; NAME, WORD and STATEMENT are filled in.
NAMES = st.sampled_from(["A", "B", "N", "LIST", "HOST_"])
VALUES = st.sampled_from(
    ["1", "8", "llama-7b", "'a b'", '"x $A"', "${A:-4}", "${B-q}", "$N", '"$B"', "$((N + 1))", "$(echo $A | tr a b)",
     "${LIST[@]}", '"${LIST[@]}"', "${#LIST[@]}", "${A%-*}", "${A/l/L}", "${B:+--b}", "$1", '"$@"', "$#", "{a,b}",
     "*.json", "~/x", "${LIST[1]}", "${A^^}", "`echo q`", "${!N}", "\\$A", "''"]
)  # fmt: skip
CONDITIONS = st.sampled_from(
    ['[ "$A" = 1 ]', "[ -n \"$B\" ]", "[ -z $A ]", "[[ $A == l* ]]", "[[ $A =~ ([0-9]+)b ]]", "(( N > 2 ))",
     "[ -f x.py ]", "[ ! -d sub ]", "[ $# -gt 1 ]", "true", "false", "[[ -n $A && $B != q ]]", "[ ${N:-8} -ge 8 ]",
     "! [ -e gone ]", "[[ -v HOST_ ]]", "test $N -eq 8", "grep -q h2 hosts", "f"]
)  # fmt: skip


def statements(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Statements with others inside."""
    return st.one_of(
        st.builds("if {0}; then {1}\nelse {2}\nfi".format, CONDITIONS, inner, inner),
        st.builds("{0} && {1}".format, CONDITIONS, inner),
        st.builds("for {0} in {1} {2}; do {3}\ndone".format, NAMES, VALUES, VALUES, inner),
        st.builds("case {0} in l*) {1};; *) {2};; esac".format, VALUES, inner, inner),
        st.builds("( {0} )".format, inner),
        st.builds("{{ {0}; }}".format, inner),
        st.builds("f() {{ {0}\n}}".format, inner),
        st.builds("{0}\n{1}".format, inner, inner),
        st.builds("i=0; while [ $i -lt 2 ]; do i=$((i+1)); {0}\ndone".format, inner),
    )


SIMPLE = st.one_of(
    st.builds("{0}={1}".format, NAMES, VALUES),
    st.builds("export {0}={1}".format, NAMES, VALUES),
    st.builds("LIST=({0} {1})".format, VALUES, VALUES),
    st.builds("LIST+=({0})".format, VALUES),
    st.builds("local {0}={1}".format, NAMES, VALUES),
    st.builds("unset {0}".format, NAMES),
    st.builds("{0}={1} torchrun --nproc_per_node {2} x.py {3}".format, NAMES, VALUES, VALUES, VALUES),
    st.builds("python x.py {0} {1}".format, VALUES, VALUES),
    st.sampled_from(["shift", "cd sub", "cd ..", "f", "set -e", "set -u", "break", "exit 0", "return", ": ${A:=5}",
                     "read -r A B < hosts", "mapfile -t LIST < hosts", "IFS=,", "set -- p q", "((N++))", "wait"]),
)  # fmt: skip
SCRIPTS = st.lists(st.recursive(SIMPLE, statements, max_leaves=6), min_size=1, max_size=6).map("\n".join)


CALLS = st.sampled_from([(), ("a b", "2")])
ENVIRONS: st.SearchStrategy[dict[str, str]] = st.sampled_from([{}, {"A": "llama-7b", "B": "two words"}, {"N": "3"}])


@pytest.mark.campaign
@settings(max_examples=400, deadline=None, suppress_health_check=[*HealthCheck])
@given(script=SCRIPTS, words=CALLS, own=ENVIRONS)
def test_any_script_starts_what_bash_starts(
    script: str, words: tuple[str, ...], own: dict[str, str], folder: Path
) -> None:
    assume(words or "$1" not in script)  # an argument that is not given is asked for by the variable's name
    unlike(f"f() {{ return 1; }}\n{script}\npython x.py $A $B $N", words, {"HOME": "/home/u", **own}, folder)

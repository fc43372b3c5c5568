"""Scripts that would do harm, were they run: each is evaluated, and nothing may have changed afterwards.

usage: python -m tests.convert.hostile FOLDER [endless]     in namespaces of its own; prints what went wrong, as JSON
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from pathlib import Path

from trainkit.convert.command import starts_program
from trainkit.convert.shell.evaluating import Script, evaluate
from trainkit.convert.shell.rewriting import UnreadError

SECRET = "SECRETTEXT"
LONGEST = 30.0  # seconds, of which an evaluation gives itself ten
# $V: a folder with what is precious, beside the one in which the script is started.
HOSTILE = r"""
/bin/rm -rf $V/*
rm -rf $V/*
command rm $V/a
\rm $V/a
"r"m $V/a
R=rm; $R $V/a
R=/bin/rm; $R $V/a
$(echo /bin/rm) $V/a
eval "/bin/rm $V/a"
eval 'rm() { /bin/rm "$@"; }'; rm $V/a
bash -c "/bin/rm $V/a"
sh -c "/bin/rm $V/a"
exec /bin/rm $V/a
builtin exec /bin/rm $V/a
echo x > $V/a
echo x >> $V/a
echo x >| $V/a
: > $V/a
exec > $V/a; echo x
exec 3> $V/a; echo x >&3
exec 3<> $V/a; echo x >&3
{ echo x; } > $V/a
(echo x) > $V/a
f() { echo x; } > $V/a; f
echo x | tee $V/a
cat <<< x > $V/a
echo x &> $V/a
echo x >& $V/a
exec {fd}> $V/a; echo x >&$fd
coproc { /bin/rm $V/a; }
x=$(/bin/rm $V/a)
x=`/bin/rm $V/a`
echo <(/bin/rm $V/a)
: >(/bin/rm $V/a)
a[$(/bin/rm $V/a)]=1
(( a[$(/bin/rm $V/a)] ))
x='a[$(/bin/rm $V/a)]'; echo $((x))
x='a[$(/bin/rm '$V'/a)]'; [[ $x -eq 1 ]]
x='a[$(/bin/rm '$V'/a)]'; test -v "$x"
x='a[$(/bin/rm '$V'/a)]'; printf -v "$x" y
x='a[$(/bin/rm '$V'/a)]'; unset "$x"
x='a[$(/bin/rm '$V'/a)]'; let "$x"
x='a[$(/bin/rm '$V'/a)]'; declare "$x=1"
x='$(/bin/rm '$V'/a)'; echo "${x@P}"
PS4='$(/bin/rm '$V'/a)'; set -x; echo
PROMPT_COMMAND="/bin/rm $V/a"; bash -i -c true
trap "/bin/rm $V/a" EXIT
trap "/bin/rm $V/a" DEBUG; echo
trap "/bin/rm $V/a" ERR; false
BASH_ENV=$V/a bash -c true
PATH=/bin; rm $V/a
export PATH=/bin:/usr/bin; rm $V/a
hash -p /bin/rm foo; foo $V/a
enable -f /x y
alias q=/bin/rm; shopt -s expand_aliases; q $V/a
mapfile -C "/bin/rm $V/a" -c 1 X <<< "a"
mapfile -t X < $V/a
read X < $V/a
while :; do :; done
while true; do sleep 1; done
:(){ :|:& };:
f(){ f|f& };f
f() { f; }; f
for ((;;)); do (:) & done
x=a; while :; do x=$x$x; done
yes | head -c 100000000000
cat /dev/zero
cat /dev/zero | head
read X < /dev/tty
exec 3<>/dev/tcp/127.0.0.1/9; echo x >&3
cat < /dev/tcp/127.0.0.1/9
echo x > /dev/udp/127.0.0.1/9
kill -9 -1
kill -9 $PPID
kill -9 1
X=kill; $X -9 -1
enable kill; kill -9 -1
builtin kill -9 -1
pkill -9 python
suspend
logout
source $V/secret
. $V/secret
source /etc/passwd
cat $V/secret > $V/b
S=$(cat /etc/passwd); python x.py "$S"
S=$(<$V/secret); python x.py "$S"
sort -o $V/a $V/secret
sort --outp $V/a $V/secret
sort -o$V/a hosts
sed -i s/a/b/ $V/a
sed 'w '$V'/a' hosts
sed 's/a/b/w '$V'/a' hosts
sed '1e /bin/rm '$V'/a' hosts
awk 'BEGIN{system("/bin/rm '$V'/a")}'
awk 'BEGIN{print "x" > "'$V'/a"}'
awk 'BEGIN{"/bin/rm '$V'/a" | getline}'
awk '@load "filefuncs"; BEGIN{}'
uniq hosts $V/a
tac --o $V/a
grep -r . / -f $V/secret
find $V -delete
find $V -exec rm {} \;
xargs -a $V/secret rm
tee $V/a < hosts
dd if=/dev/zero of=$V/a
cp hosts $V/a
mv hosts $V/a
ln -sf hosts $V/a
truncate -s 0 $V/a
python -c "import os; os.remove('$V/a')"
perl -e 'unlink "'$V'/a"'
ulimit -c unlimited; kill -SEGV $$
set +r; /bin/rm $V/a
shopt -u restricted_shell; /bin/rm $V/a
unset -f __call; /bin/rm $V/a
__call() { /bin/rm $V/a; }; echo
__ask() { :; }; torchrun x.py
declare -f __call; eval "$(declare -f __run | sed s/__run/q/)"; q 1 /bin/rm $V/a
exec 6>&-; /bin/rm $V/a
echo hi >&6; printf '9\0' >&6
printf '3\0run\0' >&6; sleep 1
read x <&7
umask 0; mkdir $V/q
cd $V && rm a
pushd $V; rm a
LD_PRELOAD=$V/a python x.py
BASH_FUNC_torchrun%%='() { /bin/rm '$V'/a; }' bash -c torchrun
function torchrun { /bin/rm $V/a; }; torchrun
bind -x '"q": /bin/rm'; echo
complete -C "/bin/rm $V/a" q; compgen -C "/bin/rm $V/a" q
compgen -C "/bin/rm $V/a"
fc -s
history -w $V/a
HISTFILE=$V/a; set -o history; history -a
printf "%(%s)T" -1; ls $V > $V/a
time /bin/rm $V/a
! /bin/rm $V/a
coproc X { cat > $V/a; }
nohup /bin/rm $V/a &
env /bin/rm $V/a
sudo /bin/rm $V/a
watch -n1 /bin/rm $V/a
timeout 5 /bin/rm $V/a
setsid /bin/rm $V/a
su -c "/bin/rm $V/a"
source <(echo "/bin/rm $V/a")
eval "$(base64 -d <<< L2Jpbi9ybSAtcmYgLwo=)"
. /dev/stdin <<< "/bin/rm $V/a"
bash <<< "/bin/rm $V/a"
bash <<EOF; /bin/rm $V/a; EOF
exec 3<$V/secret; read -u 3 X; python x.py $X
let x=$(/bin/rm $V/a)
[[ $(/bin/rm $V/a) ]]
case $(/bin/rm $V/a) in *) ;; esac
for i in $(/bin/rm $V/a); do :; done
select i in $(/bin/rm $V/a); do :; done
X=(  $(/bin/rm $V/a) )
declare X=$(/bin/rm $V/a)
${X:-$(/bin/rm $V/a)}
: ${X:=$(/bin/rm $V/a)}
: ${X:?$(/bin/rm $V/a)}
: ${X/a/$(/bin/rm $V/a)}
: "${X:$(/bin/rm $V/a)}"
cat <<EOF2; $(/bin/rm $V/a)
curl http://127.0.0.1:9 -o $V/a
wget -O $V/a http://127.0.0.1
nc -e /bin/sh 127.0.0.1 9
ssh-keygen -f $V/a -N ""
chmod 000 $V/a
touch $V/n
git -C $V init
crontab $V/a
printf x > /proc/self/oom_score_adj
echo x > /dev/shm/trainkit-hostile
while read l; do echo $l >> $V/a; done < hosts
for i in 1 2; do $(printf '\x2fbin\x2frm') $V/a; done
IFS=_; X=/bin/rm_$V/a; $X
printf -v C '%s' /bin/rm; "$C" $V/a
declare -n r=C; C=/bin/rm; $r $V/a
source ../victim/secret
cd ..; source victim/secret
ln -s $V/secret l; cat l
X=$(head -c 20 ../victim/secret); python x.py $X
ulimit -t unlimited; while :; do :; done
trap '' TERM INT XCPU; while :; do :; done
(trap '' TERM; while :; do sleep 1; done) & disown
exec -a x /bin/rm $V/a
. <(cat $V/secret)
""".strip().splitlines()

# These run until they are ended; one of them is quick enough for every day.
_ENDLESS = re.compile(r"while (:|true);|\(\(;;|:\|:|f\|f|\{ f; \}|yes|/dev/(zero|tty)")
ENDLESS = [each for each in HOSTILE if _ENDLESS.search(each) and each != "while :; do :; done"]


def lay_out(victim: Path, start: Path) -> dict[str, str]:
    """Write the files anew; what there is, by path."""
    for path, text in ((victim / "a", "precious"), (victim / "secret", f"{SECRET}\n"), (start / "hosts", "h1\nh2\n")):
        path.write_text(text)
    return there(victim.parent)


def there(folder: Path) -> dict[str, str]:
    """Each path below a folder with what it holds, and a name outside that a script writes to."""
    paths = [*sorted(folder.rglob("*")), *Path("/dev/shm").glob("trainkit-hostile*")]
    return {str(path): path.read_text() if path.is_file() else "" for path in paths}


def wrong(text: str, victim: Path, start: Path) -> str:
    """What a script did that it must not; empty for nothing."""
    before, began = lay_out(victim, start), time.monotonic()
    text = f"{text.replace('$V', str(victim))}\ntorchrun x.py\n"
    script = Script(text, starts_program, "go.sh", here=str(start), environ=dict(os.environ), is_folder=os.path.isdir)
    try:
        said = str(evaluate(script).started)
    except UnreadError as error:
        said = str(error.diagnostics)
    if there(victim.parent) != before:
        return "it has changed something"
    if SECRET in said:
        return f"it has read a secret: {said}"
    if time.monotonic() - began > LONGEST:
        return "it has taken too long"
    until = time.monotonic() + 5
    while left := processes():  # what is killed takes a moment to end
        if time.monotonic() > until:
            return f"it has left processes: {left}"
        time.sleep(0.01)
    return ""


def processes() -> list[bytes]:
    """The words of each other process here; a zombie has none."""
    found = []
    for each in Path("/proc").iterdir():
        if each.name.isdecimal() and int(each.name) != os.getpid():
            with contextlib.suppress(OSError):
                found.append(each.joinpath("cmdline").read_bytes())
    return [*filter(None, found)]


if __name__ == "__main__":
    folder, chosen = Path(sys.argv[1]), [each for each in HOSTILE if (each in ENDLESS) == (sys.argv[2:] == ["endless"])]
    (folder / "victim").mkdir()
    (folder / "start").mkdir()
    found = {text: what for text in chosen if (what := wrong(text, folder / "victim", folder / "start"))}
    print(json.dumps({"tried": len(chosen), "wrong": found}))

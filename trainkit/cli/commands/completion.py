"""`trainkit completion`: the scripts by which shells ask trainkit what may stand behind the cursor."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Annotated

from typer import Argument

from trainkit.errors import UsageError

# Each asks the trainkit that the line names, so that one script serves every virtual environment. stdin is the shell's.
BASH = r"""# bash completion of trainkit, also where it is called by a path.
_trainkit() {
  local program=${COMP_WORDS[0]} does='' line
  case $program in '~/'*) program=$HOME/${program#'~/'} ;; esac
  COMPREPLY=()
  while IFS= read -r line; do
    if [ -z "$does" ]; then does=":$line"; else COMPREPLY+=("$line"); fi
  done < <("$program" __complete bash "${COMP_LINE:0:$COMP_POINT}" "$2" 2> /dev/null < /dev/null)
  case $does in *nospace*) compopt -o nospace 2> /dev/null ;; esac
  case $does in
    *files) compopt -o default 2> /dev/null ;;
    *folders) compopt -o dirnames 2> /dev/null ;;
  esac
}
complete -o nosort -F _trainkit trainkit 2> /dev/null || complete -F _trainkit trainkit
"""
ZSH = r"""#compdef trainkit
# zsh completion of trainkit, also where it is called by a path.
_trainkit() {
  local -a answer whole parts
  local line word home
  answer=("${(@f)$("${${(Q)words[1]}/#\~\//$HOME/}" __complete zsh "${(@Q)words[2,CURRENT-1]}" "${(Q)PREFIX}" \
    2> /dev/null < /dev/null)}")
  compset -P '\~/' && home='~/'
  for line in "${(@)answer[2,-1]}"; do
    word=${${line%%$'\t'*}#$home}
    line=${word//:/\\:}:${line#*$'\t'}
    case $word in *[=./]) parts+=("$line") ;; *) whole+=("$line") ;; esac
  done
  local -i found=1
  (( $#whole )) && _describe -V -t words word whole && found=0
  (( $#parts )) && _describe -V -t parts part parts -S '' && found=0
  case $answer[1] in
    *files) compset -P '*='; _files && found=0 ;;
    *folders) compset -P '*='; _files -/ && found=0 ;;
  esac
  return found
}
if [[ $funcstack[1] == _trainkit ]]; then _trainkit; else compdef _trainkit trainkit; fi
"""
FISH = r"""# fish completion of trainkit, also where it is called by a path.
function __trainkit_complete
    set -l words (commandline -opc | string match -rv '^\w+=')
    set -l current (commandline -ct)
    set -l plain (string unescape -- $current; or echo -- $current)
    set -l program (string replace -r '^~/' $HOME/ -- $words[1])
    set -l answer ($program __complete fish $words[2..-1] "$plain" 2> /dev/null < /dev/null)
    printf '%s\n' $answer[2..-1]
    switch "$answer[1]"
        case '*files'
            set -l key (string match -r '^[^=/]*=' -- $plain)
            for path in (__fish_complete_path (string replace -r '^[^=/]*=' '' -- $plain))
                echo "$key$path"
            end
        case '*folders'
            __fish_complete_directories $plain ''
    end
end
complete -c trainkit -k -f -a '(__trainkit_complete)'
"""
SCRIPTS: Mapping[str, str] = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def completion(
    shell: Annotated[str, Argument(metavar="[SHELL]", help="bash, zsh or fish. Default: that of $SHELL.")] = "",
) -> None:
    """Print the script that completes commands, recipes, presets, runs, keys and values in a shell.

    bash: `trainkit completion bash >> ~/.bashrc`. zsh: write it to a file `_trainkit` in a folder of `fpath`. fish:
    `trainkit completion fish > ~/.config/fish/completions/trainkit.fish`. A new shell then has it.

    Example: source <(trainkit completion bash)
    """
    name = shell or os.path.basename(os.environ.get("SHELL", ""))  # noqa: PTH119
    if name not in SCRIPTS:
        raise UsageError(f"there is no completion for the shell {name!r}", hint=f"name one of {', '.join(SCRIPTS)}")
    sys.stdout.write(SCRIPTS[name])

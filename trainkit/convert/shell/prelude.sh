# What a rewritten script (rewriting.py) runs under, in a restricted shell without any program: what it would start is
# told to trainkit, which answers. Descriptors: @null, @lock with one letter, @told and @answers, which become numbers.
((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) || { printf '%s\0' 1 old >&@told; exit 125; }
unset BASH_ENV BASH_CMDS BASH_ALIASES PROMPT_COMMAND ENV OLDPWD
enable -n kill bind complete compopt fc history logout suspend caller enable 2>&@null
FUNCNEST=200

__ask() { # WORDS: __code and __text become the answer
  local IFS= REPLY
  builtin read -r -N 1 -u @lock REPLY || builtin exit 125
  builtin printf '%s\0' "$#" "$@" >&@told
  builtin read -r -d '' -u @answers __code
  builtin read -r -d '' -u @answers __text
  builtin printf x >&@lock
  [[ $__code != stop ]] || builtin exit 125
}
__refuse() { __ask refuse "$@"; builtin exit 125; }            # SITE WHY
__names() { local IFS=$'\n'; __all=($(compgen "$@")) || :; }
__need() { [[ $2 != *[$'\ue000\ue001']* ]] || __ask need "$@"; } # SITE TEXT: what is open in it decides
__need_length() { [[ $2 != *[$'\ue000\ue001']* ]] || __ask length "$@"; }
__see() { __need "$@"; builtin printf %s "$2"; }
__void() { [[ -n $2 ]] || __refuse "$1" void; }
__own() { [[ -n ${!2+x} ]] || __need "$1" $'\ue000'"$3"$'\ue001'; } # SITE VARIABLE NAME: what is added to
__of() { # SITE NAME: ${!NAME}
  __need "$1" "$2"
  [[ $2 =~ ^[A-Za-z_][A-Za-z_0-9]*$ ]] || __refuse "$1" indirect # what is left of the arguments is __of's own
  if [[ -n ${!2+x} ]]; then builtin printf %s "${!2}"; else __ask open "$1" "$2"; builtin printf %s "$__text"; fi
}
__keep() { # SITE NAME VALUE STATUS
  if [[ $3 == *$'\ue000'* ]]; then __ask keep "$@"; builtin printf %s "$__text"; else builtin printf %s "$3"; fi
  return "$4"
}
__again() { __ask again "$1" "${*:2}"; builtin printf %s "$__text"; }
__source() { __ask source "$1" "$PWD" "${@:2}"; builtin printf %s "$__text"; }
__file() { __need "$1" "$2"; __ask file "$1" "$PWD" "$2"; builtin printf %s "$__text"; }
__wrote() { __ask wrote "$1" "$PWD" "${@:2}"; builtin printf @null; }
__globbed() { [[ $PWD == "$__start" ]] || __refuse "$1" glob; __ask glob "$1"; }
__abs() { __need "$1" "$2"; [[ -z $2 ]] || { __ask seen "$1" "$PWD" "$2"; builtin printf %s "$__text"; }; }
pwd() { builtin printf '%s\n' "$PWD"; }
__cd() { # SITE cd|pushd|popd WORDS
  local site=$1 name=$2 to
  shift 2
  while [[ $# -gt 0 && $1 == -[LPe@n]* ]]; do shift; done
  [[ ${1-} != -- ]] || shift
  if [[ $name == popd ]]; then
    [[ ${#__stack[@]} -gt 0 ]] || return 1
    to=${__stack[-1]}; builtin unset "__stack[-1]"; OLDPWD=$PWD PWD=$to
    return
  fi
  [[ $# -gt 0 ]] || __ask home "$site"
  to=${1-"${HOME-}"}
  [[ $to != - ]] || to=${OLDPWD-$PWD}
  __need "$site" "$to"
  __ask cd "$site" "$PWD" "$to"
  [[ $name != pushd ]] || __stack+=("$PWD")
  [[ $__code == 0 ]] || return "$__code"
  OLDPWD=$PWD PWD=$__text
}
__test() { # SITE [ WORDS ]
  local site=$1 each=1 words=("${@:3}") last= name
  [[ $2 == test ]] || builtin unset "words[-1]"
  case ${words[0]-} in
    -n|-z) if [[ ${#words[@]} == 2 ]]; then __need_length "$site" "${words[1]}"; else __need "$site" "${words[*]}"; fi ;;
    *) if [[ ${#words[@]} == 1 ]]; then __need_length "$site" "${words[0]}"; else __need "$site" "${words[*]}"; fi ;;
  esac
  for ((each = 0; each < ${#words[@]}; each++)); do
    name=${words[each]}
    if [[ ${#words[@]} -gt 1 && $name != -* && -n $name ]] &&
      [[ $last == -[abcdefghkprsuwxLOGSN] || " -nt -ot -ef " == *" $last "* || " -nt -ot -ef " == *" ${words[each+1]-} "* ]]
    then
      __ask seen "$site" "$PWD" "$name"; words[each]=$__text
    fi
    last=$name
  done
  builtin test "${words[@]}"
}
__read() { # SITE read|mapfile|readarray WORDS
  [[ ! /dev/fd/0 -ef /dev/null ]] || __refuse "$1" typed
  local __name __held= __status=0
  builtin "${@:2}" || __status=$?
  for __name in REPLY MAPFILE "${@:3}"; do # what is split has to be known
    [[ ! $__name =~ ^[A-Za-z_][A-Za-z_0-9]*$ ]] || { __name+='[*]'; __held+=" ${!__name-}"; }
  done
  __need "$1" "$__held"
  return "$__status"
}
__call() { # SITE WORDS: a command of the script's
  local __site=$1
  shift
  ((BASH_SUBSHELL < 8)) || __refuse "$__site" deep
  [[ $# -gt 0 ]] || return 0
  __need "$__site" "$1"
  if [[ $1 != __* ]] && declare -F -- "$1" >&@null; then
    [[ $* != *[$'\ue002\ue003']$'\ue001'* ]] || __need "$__site" "$*" # words that may be none
    "$@"
    return
  fi
  case $1 in
    command|builtin)
      shift
      case ${1-} in
        -v|-V) __ask which "$__site" "$PWD" "${@:2}"; builtin printf %s "$__text"; return "$__code" ;;
        -p|--) shift ;;
      esac
      [[ $# == 0 ]] || __call "$__site" "$@"
      return ;;
    exec) shift; [[ $# -gt 0 ]] || return 0; __run "$__site" "$@"; builtin exit ;;
    cd|pushd|popd) __cd "$__site" "$@"; return ;;
    test|[) __test "$__site" "$@"; return ;;
    echo|printf|true|false|:|export|pwd) "$@"; return ;;
    exit) "$@" ;;
    eval) builtin eval "$(__again "$__site" "${@:2}")"; return ;;
    bash|sh|dash|/bin/bash|/bin/sh|/usr/bin/bash|/usr/bin/sh) __inner "$__site" "$@"; return ;;
    */*.sh) __file_of "$__site" 1 "$@"; return ;;
  esac
  __run "$__site" "$@"
}
__inner() { # SITE bash WORDS: another shell
  local site=$1 name=$2 from=3
  while [[ $from -le $# && ${!from} == -* ]]; do
    case ${!from} in
      -*c) __shell "$site" "${@:from+1}"; return ;;
      -s) ((from++)); [[ ${!from-} != -- ]] || ((from++)); __typed "$site" "$name" "${@:from}"; return ;;
      --) ((from++)); break ;;
      -l|-e|-u|-x|-eu|-ex|-eux|-i|-le|-ls|-lx|--login|--norc|--noprofile) ((from++)) ;;
      -o) ((from += 2)) ;;
      *) break ;;
    esac
  done
  if [[ $from -gt $# ]]; then __typed "$site" "${@:2}"; else __file_of "$site" "$((from - 1))" "${@:2}"; fi
}
__typed() { # SITE bash ARGUMENTS: a shell that reads what it is given
  local text=
  [[ /dev/fd/0 -ef /dev/null ]] || IFS= builtin read -r -d '' text || :
  if [[ $text == *$'\ue000#'* ]]; then __run "$@"; else __shell "$1" "$text" "${@:2}"; fi
}
__file_of() { # SITE PLACE WORDS: a command that starts a script, with its place among them
  local words=("${@:3}")
  __ask script "$1" "$2" "$PWD" "${words[$2 - 1]-}"
  if [[ $__code == 0 ]]; then __shell "$1" "$__text" "${words[@]:$2 - 1}"; else __run "$1" "${words[@]}"; fi
}
__shell() ( # SITE TEXT [NAME ARGUMENTS]: it has exported variables alone
  local __name __text_=$2
  __site=$1 __0=${3-bash}
  __need "$1" "$2"
  __names -v
  for __name in "${__all[@]}"; do
    [[ $__name == __* || $__name == PWD || ${!__name@a} == *[xr]* ]] || builtin unset -v "$__name" 2>&@null
  done
  __names -A function
  for __name in "${__all[@]}"; do [[ $__name == __* || $__name == pwd ]] || builtin unset -f "$__name"; done
  set +eu +o pipefail
  set -- "${@:4}"
  builtin eval "$(__again "$__site" "$__text_")"
)
__run() { # SITE WORDS
  local __name __set=() __in
  __names -e
  for __name in "${__all[@]}"; do # no array reaches a program
    [[ -z ${!__name+x} || ${!__name@a} == *[aA]* ]] || __set+=("$__name=${!__name}")
  done
  __ask run "$1" "$PWD" "$(($# - 1))" "${#__front[@]}" "${@:2}" "${__front[@]}" "${__set[@]}"
  if [[ $__code == inner ]]; then # __text words, and bash -c TEXT behind them
    __front+=("${@:2:__text}")
    __shell "$1" "${@:__text+4}"
    return
  fi
  if [[ $__code == in ]]; then
    IFS= builtin read -r -d '' __in || :
    __ask input "$1" "$PWD" "$__in" "${@:2}"
  fi
  if [[ -n $__text ]]; then # whoever is behind the pipe may not read it
    builtin trap '' PIPE; builtin printf %s "$__text" 2>&@null || :; builtin trap - PIPE
  fi
  return "$__code"
}
__front=()

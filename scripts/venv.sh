# Sourced, not run. Makes or reuses .venv and installs this project with its dev tools into it;
# afterwards $root is the root of the project and $venv_python its interpreter.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv_python="$root/.venv/bin/python"

_fail() {
    echo "${0##*/}: $*" >&2
    exit 1
}

_make_venv() {
    local system_python="${PYTHON:-python3}"
    command -v "$system_python" >/dev/null || _fail "$system_python not found; install Python 3.11 or newer, or set PYTHON"
    "$system_python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        _fail "$("$system_python" --version 2>&1) is too old; Python 3.11 or newer is needed (set PYTHON to choose one)"
    rm -rf "$root/.venv"
    "$system_python" -m venv "$root/.venv" || _fail "could not make .venv (on Debian and Ubuntu: install python3-venv)"
}

_install() {
    local stamp="$root/.venv/installed"
    # What the installation depends on; the root too, because an editable install points at it.
    local wanted
    wanted="$(echo "$root" && "$venv_python" --version && cat "$root/pyproject.toml")"
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        return
    fi
    (cd "$root" && "$venv_python" -m pip install --quiet --disable-pip-version-check -e '.[dev]') ||
        _fail "pip install -e '.[dev]' failed"
    printf '%s\n' "$wanted" >"$stamp"
}

# A venv whose interpreter was removed or upgraded away is made anew.
"$venv_python" -c 'import pip' 2>/dev/null || _make_venv
_install

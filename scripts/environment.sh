# shellcheck shell=bash
# Sourced by the other scripts: makes .venv once, and again when what it should hold has changed.
# Sets PYTHON. `bagua_environment EXTRAS` installs this checkout in editable form with those extras.

bagua_packages() {
  # Debian packages that pip can't bring. Installed only where they are missing and we may.
  local missing=()
  command -v ip >/dev/null || missing+=(iproute2)
  command -v unshare >/dev/null || missing+=(util-linux)
  command -v openssl >/dev/null || missing+=(openssl)
  [ -x /usr/lib/systemd/systemd ] || missing+=(systemd) # lab hosts that boot; this machine's own stays as it is
  command -v cc >/dev/null || missing+=(gcc libc6-dev) # the CPU's kernels; the lab shifts clocks by a preloaded library
  command -v c++ >/dev/null || missing+=(g++) # the tests run CUDA's kernels as C++
  [ -x /usr/sbin/sshd ] || missing+=(openssh-server openssh-client) # lab hosts that are reached over ssh
  command -v redis-server >/dev/null || missing+=(redis-server) # a backend of cached data sets; tests start their own
  [ ${#missing[@]} -eq 0 ] && return 0
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing ${missing[*]}"
    # A package must not start its service on this machine: the lab's hosts run their own.
    local guard=/usr/sbin/policy-rc.d made=
    [ -e $guard ] || { printf '#!/bin/sh\nexit 101\n' >$guard && chmod +x $guard && made=yes; }
    local done=0
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}"; } || done=$?
    [ -z "$made" ] || rm -f $guard
    return $done
  else
    echo "not installed: ${missing[*]}; tests on lab hosts need them" >&2
  fi
}

bagua_python() {
  local candidate
  for candidate in ${BAGUA_PYTHON:-python3.11 python3.12 python3.13 python3}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return 0
    fi
  done
  echo "bagua needs Python 3.11 or later on PATH (or in BAGUA_PYTHON)" >&2
  return 1
}

bagua_environment() {
  local extras=$1 stamp wanted base
  base=$(bagua_python) || return 1
  PYTHON=$PWD/.venv/bin/python
  stamp=.venv/installed-$extras
  wanted=$(cat pyproject.toml setup.py tests/constraints.txt scripts/environment.sh | sha256sum)
  [ -x "$PYTHON" ] || "$base" -m venv .venv
  if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    # torch first and alone: its constraint names a build, and nothing else may choose another one.
    "$PYTHON" -m pip install -qq --disable-pip-version-check -c tests/constraints.txt torch
    "$PYTHON" -m pip install -qq --disable-pip-version-check -c tests/constraints.txt setuptools wheel
    "$PYTHON" -m pip install -qq --disable-pip-version-check -c tests/constraints.txt \
      --no-build-isolation --editable ".[$extras]"
    echo "$wanted" >"$stamp"
  fi
}

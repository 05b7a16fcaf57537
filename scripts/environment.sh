# shellcheck shell=bash
# Sourced by the other scripts: creates .venv, and creates it again when its requirements have changed.
# Sets PYTHON.

bagua_apt() {
  # Another apt may be at work, as at a machine's first boot; its lock is waited for, up to two minutes.
  local words=(-qq -o DPkg::Lock::Timeout=120) deadline=$((SECONDS + 120)) said
  while ! said=$(DEBIAN_FRONTEND=noninteractive apt-get "${words[@]}" "$@" 2>&1); do
    case $said in *"nable to lock"* | *"not get lock"*) [ $SECONDS -ge $deadline ] || { sleep 1 && continue; } ;; esac
    echo "$said" >&2
    return 1
  done
}

bagua_packages() {
  # Debian packages that pip can't install. Installed only where they are missing and the user may install them.
  local missing=() lean=() # lean: without what apt recommends beside them
  command -v ip >/dev/null || missing+=(iproute2)
  command -v unshare >/dev/null || missing+=(util-linux)
  command -v openssl >/dev/null || missing+=(openssl)
  [ -x /usr/lib/systemd/systemd ] || missing+=(systemd) # lab hosts that boot; this machine's own stays as it is
  command -v cc >/dev/null || missing+=(gcc libc6-dev) # the CPU's kernels; the lab shifts clocks by a preloaded library
  command -v c++ >/dev/null || missing+=(g++) # the tests run CUDA's kernels as C++
  [ -x /usr/sbin/sshd ] || missing+=(openssh-server openssh-client) # lab hosts that are reached over ssh
  command -v redis-server >/dev/null || missing+=(redis-server) # a backend of cached data sets; tests start their own
  command -v promtool >/dev/null || lean+=(prometheus) # runs the alert rules and the dashboards' queries
  [ -x /usr/sbin/slurmctld ] || lean+=(slurmctld slurmd slurm-client munge) # batch jobs on lab hosts
  # a kernel that tests boot, for control groups of each kind; only packaged for this processor
  [ "$(uname -m)" != x86_64 ] || command -v linux.uml >/dev/null || missing+=(user-mode-linux)
  local all=("${missing[@]}" "${lean[@]}")
  [ ${#all[@]} -eq 0 ] && return 0
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing ${all[*]}"
    # A package must not start its service on this machine: the lab's hosts run their own.
    local guard=/usr/sbin/policy-rc.d made=
    [ -e $guard ] || { printf '#!/bin/sh\nexit 101\n' >$guard && chmod +x $guard && made=yes; }
    local done=0
    bagua_apt update || done=$?
    [ $done != 0 ] || [ ${#missing[@]} -eq 0 ] || bagua_apt install -y "${missing[@]}" || done=$?
    [ $done != 0 ] || [ ${#lean[@]} -eq 0 ] || bagua_apt install -y --no-install-recommends "${lean[@]}" || done=$?
    [ -z "$made" ] || rm -f $guard
    return $done
  else
    echo "not installed: ${all[*]}; tests need them" >&2
  fi
}

bagua_browser() {
  # A Chromium for the tests of the dashboard's page; without one they are skipped, with the reason. Not every distribution
  # has a package of it that apt can install alone.
  local program
  for program in chromium chromium-browser google-chrome; do
    command -v $program >/dev/null && return 0
  done
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing chromium"
    bagua_apt update && bagua_apt install -y --no-install-recommends chromium && return 0
  fi
  echo "not installed: chromium; tests of the dashboard's page are skipped" >&2
}

bagua_containers() {
  # Podman for the test of the image, about 110 MB; without it that test is skipped, with the reason. debootstrap makes a
  # base image where no registry is reached.
  local missing=() program
  for program in podman crun iptables debootstrap; do
    command -v $program >/dev/null || missing+=("$program")
  done
  [ -x /usr/lib/podman/netavark ] && [ -x /usr/lib/podman/aardvark-dns ] || missing+=(netavark aardvark-dns)
  [ ${#missing[@]} -eq 0 ] && return 0
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing ${missing[*]}"
    bagua_apt update && bagua_apt install -y --no-install-recommends "${missing[@]}" && return 0
  fi
  echo "not installed: ${missing[*]}; the test of the container image is skipped" >&2
}

bagua_lab_etcd() {
  # Tests kill members of a cluster. Those of the etcd that PyPI has, 3.5.1, can differ for ever afterwards (etcd #13766).
  # Debian's is unpacked beside the environment and not installed: jobs of the tests whose etcd is their own shall find the
  # one that users get. Called after bagua_environment.
  local directory=$PWD/.venv/lab-etcd unpacked
  [ ! -x "$directory/usr/bin/etcd" ] || return 0
  if ! command -v apt-get >/dev/null || ! command -v dpkg >/dev/null; then
    echo "no etcd of Debian's: tests that kill members of a cluster need one of 3.5.6 or later on PATH" >&2
    return 0
  fi
  echo "unpacking Debian's etcd for clusters of the tests"
  unpacked=$(mktemp -d) && chmod 755 "$unpacked"
  if ! (cd "$unpacked" && apt-get -qq download etcd-server 2>/dev/null); then
    if ! bagua_apt update || ! (cd "$unpacked" && apt-get -qq download etcd-server); then
      rm -rf "$unpacked"
      echo "Debian's etcd-server can't be had: tests that kill members of a cluster need an etcd of 3.5.6 or later on PATH" >&2
      return 0
    fi
  fi
  dpkg -x "$unpacked"/etcd-server_*.deb "$directory"
  rm -rf "$unpacked"
}

bagua_python() {
  local candidate
  for candidate in ${BAGUA_PYTHON:-python3.11 python3.12 python3.13 python3.14 python3}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return 0
    fi
  done
  echo "bagua needs Python 3.11 or later on PATH (or in BAGUA_PYTHON)" >&2
  return 1
}

# bagua_environment EXTRAS installs this checkout in editable form, with the versions that the tests run with.
#   BAGUA_TORCH        another version of torch, as 2.15.0; `newest` for whatever the index has
#   BAGUA_TORCH_INDEX  the package index that torch comes from; else pip's own settings decide
bagua_environment() {
  local extras=$1 stamp wanted base want have constraints=.venv/constraints.txt
  local from=() bar=off
  base=$(bagua_python) || return 1
  PYTHON=$PWD/.venv/bin/python
  stamp=.venv/installed-${extras:-nothing-else}
  wanted=$({ cat pyproject.toml setup.py tests/constraints.txt scripts/environment.sh && echo "${BAGUA_TORCH:-}"; } | sha256sum)
  # Debian's Python without python3-venv leaves an environment without pip: nothing must take that for complete.
  [ -x "$PYTHON" ] || "$base" -m venv .venv || { rm -rf .venv; return 1; }
  [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ] || return 0
  case ${BAGUA_TORCH:-} in
    '') cp tests/constraints.txt $constraints ;;
    newest) grep -v '^torch==' tests/constraints.txt >$constraints ;;
    *) sed "s/^torch==.*/torch==$BAGUA_TORCH/" tests/constraints.txt >$constraints ;;
  esac
  # torch first and alone: its constraint names a version, and nothing else may choose another one. Its progress is shown,
  # for a build with CUDA brings gigabytes.
  want=$(sed -n 's/^torch==//p' $constraints)
  have=$("$PYTHON" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null || true)
  if [ -z "$want" ] || [ "${have%%+*}" != "$want" ]; then
    [ -z "${BAGUA_TORCH_INDEX:-}" ] || from=(--index-url "$BAGUA_TORCH_INDEX")
    [ ! -t 1 ] || bar=on
    echo "installing torch into .venv: 200 MB for a build without CUDA, 3 GB with it (BAGUA_TORCH_INDEX names another index)"
    "$PYTHON" -m pip install --disable-pip-version-check --progress-bar $bar -c $constraints "${from[@]}" torch || return 1
  fi
  echo "installing bagua and what it needs${extras:+, with its extras $extras}"
  "$PYTHON" -m pip install -qq --disable-pip-version-check -c $constraints setuptools wheel || return 1
  "$PYTHON" -m pip install -qq --disable-pip-version-check -c $constraints \
    --no-build-isolation --editable ".${extras:+[$extras]}" || return 1
  # litdata requires torchvision, for images alone. A build of another index than torch's does not load beside it, and
  # Lightning, which loads it where it is installed, fails with it.
  if "$PYTHON" -m pip show -qq torchvision 2>/dev/null && ! "$PYTHON" -c 'import torchvision' 2>/dev/null; then
    echo "removing torchvision, which does not load beside this torch"
    "$PYTHON" -m pip uninstall -qq --disable-pip-version-check --yes torchvision || return 1
  fi
  echo "$wanted" >"$stamp"
}

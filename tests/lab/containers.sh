#!/bin/bash
# Process 1 of a space for containers (containers.py): hides what podman would share with this machine's own containers.
#
#   containers.sh EMPTY_DIRECTORY
#
# Needs mount, process and network namespaces of its own. Says "ready", ends when its standard input ends, and reaps what
# is left to it until then, which is why it is bash.
set -e
ip link set lo up
# crun refuses a machine with control groups of both versions, and none are used here
[ "$(stat -f -c %T /sys/fs/cgroup)" = cgroup2fs ] || {
  umount -R /sys/fs/cgroup
  mount -t cgroup2 cgroup2 /sys/fs/cgroup
}
# podman, crun and netavark keep state in /run, also where options name other directories. Without systemd's socket, podman
# cannot start timers for health checks there. A resolv.conf may be a link to systemd's.
mount -t tmpfs tmpfs "$1"
[ ! -d /run/systemd/resolve ] || { mkdir "$1/systemd" && cp -a /run/systemd/resolve "$1/systemd"; }
mount --no-mtab --move "$1" /run
# where else podman remembers what it pulled
mkdir -p /var/lib/containers
mount -t tmpfs tmpfs /var/lib/containers
echo ready
read -r _ || exit 0

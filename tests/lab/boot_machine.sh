#!/bin/sh
# Process 1 of a lab host that runs systemd: a root of its own over this machine's, then systemd in it.
#
#   boot_machine.sh DISK NAME ETC_HOSTS KEEP...
#
# DISK: a tmpfs that outlives a reboot. KEEP: paths of this machine that must be seen although they lie under /tmp or /run.
# Needs mount, process, uts, ipc, cgroup namespaces of its own. Nothing is written to the machine's own root.
set -e
disk=$1 name=$2 hosts=$3
shift 3
mount --make-rprivate /
root=$disk/root
mkdir -p "$disk/upper" "$disk/work" "$root"
first_boot=
[ -e "$disk/upper/etc/hostname" ] || first_boot=yes
mount -t overlay overlay -o "lowerdir=/,upperdir=$disk/upper,workdir=$disk/work" "$root"
if [ $first_boot ]; then
  # none of this machine's own services
  rm -rf "$root"/etc/systemd/system/* "$root"/etc/rc?.d
  tr -d - < /proc/sys/kernel/random/uuid > "$root/etc/machine-id"
  echo "$name" > "$root/etc/hostname"
  cat "$hosts" > "$root/etc/hosts"
  # its accounts may pass through homes of this machine to the interpreter and the checkout
  for path in "$@"; do
    while path=$(dirname "$path") && [ "$path" != / ]; do
      [ ! -d "$root$path" ] || chmod a+rx "$root$path" # on a file system of its own it is bound below, or not at all
    done
  done
fi
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for device in null zero full random urandom tty; do
  : > "$root/dev/$device"
  mount --bind "/dev/$device" "$root/dev/$device"
done
mkdir "$root/dev/pts" "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
for path in "$@"; do
  case $path in
  /tmp/* | /run/* | /dev/shm/*)
    mkdir -p "$root$path"
    mount --rbind "$path" "$root$path"
    ;;
  esac
done
mkdir -p "$root/.machine"
cd "$root"
pivot_root . .machine
umount -l /.machine
hostname "$name"
exec env -i container=lab PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
  /usr/lib/systemd/systemd --system --unit=multi-user.target --show-status=no

# The first process of a node; its argument is the node's folder. It sets up what the node has of
# its own, and then only waits and takes in orphaned processes, as a first process must.
set -e
mount -t proc proc /proc
for folder in var/lib var/log run opt; do
  mkdir -p "$1/own/$folder"
  mount --bind "$1/own/$folder" "/$folder"
done
# The kubelet would set these for the whole machine: let it find them set.
for setting in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1; do
  mkdir -p "$1/settings/${setting%/*}"
  echo "${setting#*=}" >"$1/settings/${setting%=*}"
  mount --bind "$1/settings/${setting%=*}" "/proc/sys/${setting%=*}"
done
touch "$1/started"
while :; do
  sleep infinity &
  wait $! || true
done

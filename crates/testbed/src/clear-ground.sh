# Clears the ground of a test bed whose process has died: clear-ground DIRECTORY NAMESPACES.
# Whoever drops a test bed in order says so on our standard input, and there is nothing to do.
directory=$1
namespaces=$2
trap '' INT HUP TERM
read -r _ && exit

# Fails when there is nobody to kill.
kill_ours() {
    found=1
    for process in /proc/[0-9]*; do
        case $(readlink "$process/exe") in */milpa | */milpa\ * | */milpa-*) ;; *) continue ;; esac
        tr '\0' '\n' 2> /dev/null < "$process/cmdline" | grep -qF "$directory" || continue
        kill -9 "${process#/proc/}" && found=0
    done
    return $found
}

# Again, for what the killed ones were just starting, and not for ever: one may hang in the kernel.
for _ in 1 2 3 4 5; do
    kill_ours || break
done
# The innermost mount first.
while read -r _ place _; do
    case $place in "$directory"/*) echo "$place" ;; esac
done < /proc/mounts | sort -r | while read -r place; do umount -l "$place"; done
[ ! -d /run/netns ] || ip netns list | while read -r name _; do
    case $name in "$namespaces"*) ip netns del "$name" ;; esac
done
rm -rf --one-file-system "$directory"

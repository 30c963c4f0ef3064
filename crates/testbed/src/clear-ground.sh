# Clears the ground of a test bed whose process has died: clear-ground DIRECTORY NAMESPACES.
# Whoever drops a test bed in order says so on our standard input, and there is nothing to do.
directory=$1
namespaces=$2
trap '' INT HUP TERM
read -r _ && exit

kill_ours() {
    for process in /proc/[0-9]*; do
        case $(readlink "$process/exe") in */milpa | */milpa\ * | */milpa-*) ;; *) continue ;; esac
        tr '\0' '\n' < "$process/cmdline" | grep -qF "$directory" && kill -9 "${process#/proc/}"
    done
}

kill_ours
kill_ours # what the first ones were just starting
# The innermost mount first.
while read -r _ place _; do
    case $place in "$directory"/*) echo "$place" ;; esac
done < /proc/mounts | sort -r | while read -r place; do umount -l "$place"; done
ip netns list | while read -r name _; do
    case $name in "$namespaces"*) ip netns del "$name" ;; esac
done
rm -rf --one-file-system "$directory"

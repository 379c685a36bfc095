#!/usr/bin/env bash
# Makes a Debian package from a built program: scripts/package.sh PROGRAM DIRECTORY
#
# In: the program, packaging/, and dpkg-deb, which each Debian system has. Out: DIRECTORY/hermes_VERSION_ARCH.deb, and the
# program's line tables (hermes.debug) beside it. The same source and program make the same package, byte for byte.
# COMPRESSION=none is for tests.
set -euo pipefail
program=$(realpath "$1")
mkdir -p "$2"
out=$(realpath "$2")
cd "$(dirname "$0")/.."
command -v dpkg-deb >/dev/null || { echo "package: dpkg-deb is missing; install dpkg" >&2; exit 1; }

# The time stamp of all files in the package.
: "${SOURCE_DATE_EPOCH:=$(git log -1 --format=%ct 2>/dev/null || stat -c %Y Cargo.toml)}"
export SOURCE_DATE_EPOCH
umask 022
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
chmod 0755 "$root"
version=$("$program" --version | cut -d ' ' -f 2)
arch=$(dpkg --print-architecture)
doc=$root/usr/share/doc/hermes

install -D -m 0755 "$program" "$root/usr/bin/hermes"
install -D -m 0644 packaging/sysusers.conf "$root/usr/lib/sysusers.d/hermes.conf"
install -D -m 0644 packaging/node.yaml "$root/etc/hermes/node.yaml"
install -D -m 0644 packaging/copyright "$doc/copyright"

# The units are those of `hermes install`, without its remark on where to write them.
unit() { # NAME ARGUMENT...
  local name=$1; shift
  install -d "$root/usr/lib/systemd/system"
  "$program" install --print systemd --program /usr/bin/hermes "$@" |
    sed -e '/Install: write this to/,/systemctl daemon-reload/d' -e '/^Description=/a Documentation=man:hermes(1)' \
      >"$root/usr/lib/systemd/system/$name.service"
}
unit hermes --config /etc/hermes/node.yaml --drain 10s
unit hermes-controller controller

completions() { # SHELL FILE
  install -d "$(dirname "$root/$2")"
  "$program" completions "$1" >"$root/$2"
}
completions bash usr/share/bash-completion/completions/hermes
completions zsh usr/share/zsh/vendor-completions/_hermes
completions fish usr/share/fish/vendor_completions.d/hermes.fish

install -d "$root/usr/share/man/man1"
"$program" man --all "$root/usr/share/man/man1"
gzip -9n "$root"/usr/share/man/man1/*

cargo tree --locked --package hermes --edges normal --prefix none --format '{p} {l}' |
  grep -v '(/' | sed 's/ (\*)$//' | sort -u >"$doc/third-party.txt"
gzip -9nc CHANGELOG.md >"$doc/changelog.gz"
gzip -9nc >"$doc/changelog.Debian.gz" <<CHANGES
hermes ($version-1) unstable; urgency=medium

  * Hermes $version; changelog.gz lists the changes.

 -- The Hermes authors <hermes@example.invalid>  $(date -u -R -d "@$SOURCE_DATE_EPOCH")
CHANGES

# The newest version of the C library's symbols that the program uses.
glibc=$(objdump -T "$program" | grep -o 'GLIBC_[0-9.]*' | sort -Vu | tail -n 1 | cut -d _ -f 2)
size=$(du -sk --apparent-size "$root" | cut -f 1)
install -d "$root/DEBIAN"
(cd "$root" && find usr etc -type f -print0 | sort -z | xargs -0 md5sum) >"$root/DEBIAN/md5sums"
echo /etc/hermes/node.yaml >"$root/DEBIAN/conffiles"
install -m 0755 packaging/postinst packaging/prerm packaging/postrm "$root/DEBIAN"
cat >"$root/DEBIAN/control" <<CONTROL
Package: hermes
Version: $version-1
Architecture: $arch
Maintainer: The Hermes authors <hermes@example.invalid>
Installed-Size: $size
Depends: libc6 (>= $glibc), libgcc-s1, procps, systemd | systemd-standalone-sysusers | systemd-sysusers
Recommends: ca-certificates
Suggests: nftables, openssh-client
Section: net
Priority: optional
Description: proxy overlay for HTTP, TCP, UDP and IP
 Hermes carries HTTP, TCP, UDP and IP packets from applications to services,
 through proxies that their owner controls. One program is the proxy on devices
 and servers, the router in between, the controller, and the command line.
CONTROL

rm -f "$out"/hermes_*.deb "$out/hermes.debug"
dpkg-deb --root-owner-group -Z"${COMPRESSION:-xz}" --build "$root" "$out/hermes_$version-1_$arch.deb" >/dev/null
if [ -f "$program.debug" ]; then ln -f "$program.debug" "$out/hermes.debug"; fi
ls -lh "$out"

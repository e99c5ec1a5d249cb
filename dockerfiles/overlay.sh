#!/bin/sh
# Lay our environment, /opt/moegate, over an interpreter that has torch and Triton (and perhaps an engine), without touching it.
#
# Usage: overlay.sh PYTHON WHEELS [PIP OPTION ...]
#   PYTHON   the interpreter whose torch, Triton and engine the measurements are about
#   WHEELS   folder with our wheel
#
# Our environment sees that interpreter's packages (through a .pth file), and never the other way round. Everything that is
# installed there is a constraint: pip may add what is missing, and fails rather than shadow one package with another version.
set -eu

python=$1
wheels=$2
shift 2
target=/opt/moegate

"$python" - <<'PROBE' >/tmp/overlay-below
import sys
print("\n".join(path for path in sys.path if path.endswith(("site-packages", "dist-packages"))))
PROBE
"$python" - <<'PROBE' >/tmp/overlay-constraints
import importlib.metadata
names = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions() if d.metadata["Name"]}
print("\n".join(f"{name}=={version}" for name, version in sorted(names.items()) if name not in ("pip", "setuptools", "wheel")))
PROBE
grep -q '^torch==' /tmp/overlay-constraints || { echo "overlay: $python has no torch" >&2; exit 1; }
grep -qE '^(triton|triton-xpu|pytorch-triton-rocm|pytorch-triton-xpu)==' /tmp/overlay-constraints || {
    echo "overlay: $python has no Triton" >&2
    exit 1
}

"$python" -m venv "$target" || { echo "overlay: $python has no venv module (apt-get install python3-venv)" >&2; exit 1; }
site=$("$target/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
while read -r path; do
    # A plain path in a .pth file would not run the .pth files inside it, which is how editable engines are found.
    echo "import site; site.addsitedir('$path')"
done </tmp/overlay-below >"$site/engine.pth"
cp /tmp/overlay-constraints "$target/engine-constraints.txt"

wheel=$(echo "$wheels"/moegate-*.whl)
"$target/bin/python" -m pip install --no-cache-dir --disable-pip-version-check \
    --constraint "$target/engine-constraints.txt" "$@" "${wheel}[serve]"

for name in torch triton; do
    if [ -e "$site/$name" ]; then
        echo "overlay: pip put its own $name into $target" >&2
        exit 1
    fi
done
"$target/bin/python" -P -c 'import moegate, orchestrator, tuner, serving, xkernels'
rm -f /tmp/overlay-below /tmp/overlay-constraints

# Sourced by venv.sh and wheelhouse.sh: where the pinned CPU build of torch comes from.
#
# PyPI's torch of the same version is a CUDA build of gigabytes. A local folder or mirror that pip is configured with may have
# the CPU build; where it has not, that one wheel (and nothing else) is taken from PyTorch's public CPU index.
# shellcheck shell=bash

torch_pin=$(sed -n 's/^torch==/torch==/p' constraints/cpu.txt)

# torch_options PIP...: prints the options for `PIP install|download --no-deps` of $torch_pin.
torch_options() {
    local versions
    versions=$("$@" index versions torch 2>/dev/null || true)
    if [[ "$versions" != *"${torch_pin#torch==}"* ]]; then
        echo "--index-url https://download.pytorch.org/whl/cpu"
    fi
}

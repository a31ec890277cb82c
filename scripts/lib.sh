# Sourced by the scripts beside it, in the root of the repository: uv, the machine's device, the variables of a run.

UV_VERSION=0.13.9

die() {
    printf '%s: error: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

# Put uv on PATH: this version of it, in the repository, from any Python that has pip.
get_uv() {
    export PATH="$PWD/.venv/uv/bin:$PATH"
    # uv does not read pip's variables; a machine set up for pip must do.
    if [ -n "${PIP_FIND_LINKS:-}" ]; then export UV_FIND_LINKS="${UV_FIND_LINKS:-$PIP_FIND_LINKS}"; fi
    if [ -n "${PIP_INDEX_URL:-}" ]; then export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$PIP_INDEX_URL}"; fi
    if [ -n "${PIP_EXTRA_INDEX_URL:-}" ]; then export UV_INDEX="${UV_INDEX:-$PIP_EXTRA_INDEX_URL}"; fi
    if [ -n "${PIP_CERT:-}" ]; then export SSL_CERT_FILE="${SSL_CERT_FILE:-$PIP_CERT}"; fi
    [ "$(.venv/uv/bin/uv --version 2>/dev/null | cut -d' ' -f2)" = "$UV_VERSION" ] && return

    local python
    for python in python3.11 python3 python; do
        # --target works without venv's ensurepip and on a Python that the system manages.
        if "$python" -m pip --version >/dev/null 2>&1; then
            rm -rf .venv/uv
            PIP_ROOT_USER_ACTION=ignore "$python" -m pip install --quiet --no-cache-dir --target .venv/uv "uv==$UV_VERSION" && return
        fi
    done
    command -v uv >/dev/null && return
    die "needs uv $UV_VERSION and could not install it: no python3.11, python3 or python here has a working pip." \
        "Install Python 3.11 with pip (Debian: apt-get install python3.11 python3-pip), or uv itself."
}

# gpu if NVIDIA's driver answers, else cpu. DEEPINFER_ACCELERATOR=cpu forces the latter.
device() {
    if [ "${DEEPINFER_ACCELERATOR:-}" != cpu ] && nvidia-smi -L >/dev/null 2>&1; then echo gpu; else echo cpu; fi
}

# The variables that every run of ours needs; what the caller has set stays.
export_run_variables() {
    # Without bytecode each process parses an engine's million lines again: 20 s and more per start.
    unset PYTHONDONTWRITEBYTECODE
    if [ "$(device)" = cpu ]; then
        export TRITON_INTERPRET="${TRITON_INTERPRET:-1}"
        # The small models here are too small for more: threads that wait for each other cost tenfold.
        export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
        export VLLM_ENABLE_V1_MULTIPROCESSING="${VLLM_ENABLE_V1_MULTIPROCESSING:-0}"
    fi
}

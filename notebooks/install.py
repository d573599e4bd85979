# Installs the library where it is missing, as on a fresh Colab runtime (CPU or GPU).
import importlib.util
import os
import shutil
import subprocess
import sys

# PyPI's release, or the address (https://, git+https:// or file://) of a wheel or repository.
ADDRESS = os.environ.get("MAMBA_STATE_PALLAS", "")
if importlib.util.find_spec("pallas_kernels") is None:
    package = "mamba-state-pallas[serving,plot]" + (f" @ {ADDRESS}" if ADDRESS else "")
    gpu = ["jax[cuda12]"] if shutil.which("nvidia-smi") else []  # JAX's CUDA plugin must be of JAX's own version
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", package, *gpu], check=True)

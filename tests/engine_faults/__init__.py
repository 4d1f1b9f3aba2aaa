"""See `engine_faults.py`; `ENVIRONMENT` lets the servers of a process find it."""

from pathlib import Path

FOLDER = str(Path(__file__).parent)
PLUGIN = "engine_faults"
NOISE_VARIABLE = "ENGINE_FAULTS_NOISE"
MEMORY_VARIABLE = "ENGINE_FAULTS_MEMORY"


def environment(*folders: str, noise: str = "") -> dict[str, str]:
    """Variables for a process whose engines have the plugin; `folders` are on PYTHONPATH too."""
    found = {"PYTHONPATH": ":".join([FOLDER, *folders]), "VLLM_PLUGINS": PLUGIN}
    if noise:
        found[NOISE_VARIABLE] = noise
    return found

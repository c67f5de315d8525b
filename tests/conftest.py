"""Test set-up: eight CPU devices, a persistent compilation cache outside the checkout, before JAX starts."""

import os
import tempfile
from pathlib import Path

CACHE = os.environ.get(
    "JAXRL_TEST_CACHE", str(Path(tempfile.gettempdir()) / "jaxrl_llm_test_cache")
)

FLAGS = {
    "--xla_force_host_platform_device_count": "8",
    "--xla_cpu_collective_call_terminate_timeout_seconds": "600",
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds": "300",
}
present = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join(
    [present, *(f"{flag}={value}" for flag, value in FLAGS.items() if flag not in present)]
).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_COMPILATION_CACHE_DIR"] = CACHE
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "0"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.pop("JAXRL_RUN_DIR", None)

from jaxrl_llm.compilation_cache import write_whole_entries  # noqa: E402

write_whole_entries()

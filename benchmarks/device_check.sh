#!/usr/bin/env bash
# How fast and how exact this machine's accelerator is, in one command of at most eight minutes:
#
#   bash benchmarks/device_check.sh            one device: SmolLM2-135M and a random Llama of a billion parameters
#   bash benchmarks/device_check.sh --tiny     any machine: a model of a few layers, under a minute
#
# Prints JSON lines, the last of which is the summary. PYTHON names another interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
exec timeout 480 "${PYTHON:-python}" benchmarks/device_check.py "$@"

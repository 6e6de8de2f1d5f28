"""The one form of a result: what ran where, at which commit, with all samples. No host names."""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

ROOT = Path(__file__).parent.parent


def parser(question: str) -> argparse.ArgumentParser:
    """The options that every benchmark takes."""
    options = argparse.ArgumentParser(description=question)
    options.add_argument("--yardsticks", default=str(ROOT.parent / "shared" / "bench"))
    options.add_argument("--out", help="write the JSON here; printed in any case")
    options.add_argument(
        "--commit", default=None, help="the commit measured; asked of git if absent"
    )
    return options


def yardstick(folder: str, name: str) -> ModuleType:
    """Import one of the baselines by path."""
    spec = importlib.util.spec_from_file_location(name, Path(folder) / f"{name}.py")
    if spec is None or spec.loader is None:
        raise SystemExit(f"no yardstick {name}.py in {folder}; pass --yardsticks FOLDER")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def host_us(call: Callable[[], Any], calls: int = 1000, rounds: int = 7) -> list[float]:
    """Host-to-host microseconds of a call: the mean of each round, one synchronise a round."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for _ in range(min(200, calls)):
        call()
    samples = []
    for _ in range(rounds):
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        wait()
        samples.append((time.perf_counter() - start) / calls * 1e6)
    return samples


def spread(samples: list[float]) -> dict[str, Any]:
    """Median, 20th and 80th percentile, and the samples themselves."""
    ordered = sorted(samples)
    low, high = ordered[len(ordered) // 5], ordered[-1 - len(ordered) // 5]
    return {
        "median": round(statistics.median(ordered), 3),
        "p20": round(low, 3),
        "p80": round(high, 3),
        "samples": [round(sample, 3) for sample in samples],
    }


def write(name: str, options: argparse.Namespace, results: Mapping[str, Any]) -> None:
    """Print the record and keep it if `--out` says where."""
    gpu = torch.cuda.is_available()
    record = {
        "benchmark": name,
        "gpu": torch.cuda.get_device_name() if gpu else None,
        "driver": _driver() if gpu else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "commit": options.commit or _commit(),
        "arguments": {
            k: v
            for k, v in vars(options).items()
            if k not in ("out", "commit", "yardsticks", "trace")
        },
        "results": results,
    }
    text = json.dumps(record, indent=1)
    print(text)
    if options.out:
        Path(options.out).write_text(text + "\n")


def _driver() -> str:
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


def _commit() -> str:
    asked = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()

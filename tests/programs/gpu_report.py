"""What the steps of scripts/test-gpu have said: `gpu_report.py FOLDER` writes results.json and
results.md there, from a log of each run. `gpu_report.py --check` says why no step can run here."""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

VERSIONS = ("gpu", "driver", "nccl", "cupy", "torch")


def missing() -> str:
    """Return why this machine cannot run the steps; "" if it can."""
    if os.environ.get("STANDIN"):
        return ""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"no driver of NVIDIA's ({error})"
    count = ctypes.c_int()
    if code := driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return f"the driver answers with error {code}"
    return "" if count.value else "the driver finds no GPU"


def run_of(log: Path) -> dict[str, Any]:
    """Return what one run said: its lines of JSON, and whether all is well."""
    text = log.read_text(errors="replace")
    lines = []
    for line in text.splitlines():
        if "{" in line:
            try:
                lines.append(json.loads(line[line.index("{") :]))
            except ValueError:
                continue
    found = re.findall(r"^exit code (\d+)$", text, re.MULTILINE)
    code = int(found[-1]) if found else None
    failed = sorted({str(each["check"]) for each in lines if each.get("ok") is False})
    if "Exception ignored" in text:
        failed.append("an exception at the end of the process")
    step, _, ranks = log.stem.rpartition("-")
    return {
        "step": step, "ranks": int(ranks), "exit_code": code, "lines": lines, "failed": failed,
        "ok": code == 0 and not failed,
    }  # fmt: skip


def report(folder: Path) -> None:
    """Write results.json and results.md."""
    runs = sorted(map(run_of, folder.glob("*-*.log")), key=lambda run: (run["step"], run["ranks"]))
    said = [line for run in runs for line in run["lines"]]
    versions = {
        name: next((line[name] for line in said if isinstance(line.get(name), str | int)), None)
        for name in VERSIONS
    }
    if os.environ.get("STANDIN"):
        versions["gpu"] = "none: over the stand-ins"
    (folder / "results.json").write_text(json.dumps({"versions": versions, "runs": runs}, indent=1))
    rows = [
        "Versions: " + ", ".join(f"{name} {value}" for name, value in versions.items() if value),
        "", "| step | ranks | result |", "|---|---|---|",
    ]  # fmt: skip
    for run in runs:
        result = (
            "passes"
            if run["ok"]
            else "fails: " + ("; ".join(run["failed"][:5]) or f"exit code {run['exit_code']}")
        )
        rows.append(f"| `{run['step']}` | {run['ranks']} | {result} |")
    (folder / "results.md").write_text("\n".join(rows) + "\n")
    print("\n".join(rows))


if __name__ == "__main__":
    if sys.argv[1] == "--check":
        if why := missing():
            sys.exit(
                f"scripts/test-gpu needs a GPU of NVIDIA's, and here is {why}. Without one, build "
                "the stand-ins by `python tests/support/fake_cuda.py FOLDER`, and set "
                "STANDIN=FOLDER"
            )
    else:
        report(Path(sys.argv[1]))

"""The container image starts a broker as its file says: run here without a container (C18)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE = (ROOT / "deploy" / "container" / "Dockerfile").read_text()
START_S = 60.0


def words(instruction: str) -> list[str]:
    found = re.search(rf"^{instruction} (\[.*\])$", FILE, re.MULTILINE)
    assert found, instruction
    made: list[str] = json.loads(found[1])
    return made


def test_what_the_image_runs_becomes_healthy(tmp_path: Path) -> None:
    secret, data = tmp_path / "secret", tmp_path / "data"
    (name, path), *_ = re.findall(r"^ENV (\w+)=(\S+)$", FILE, re.MULTILINE)
    secret.write_text("0123456789abcdef0123456789abcdef\n")
    # The same command, but for its place and for ports that may be taken on this machine.
    start = [word.replace("/data", str(data)) for word in words("CMD")]
    start = [re.sub(r"^0\.0\.0\.0:\d+$", "0.0.0.0:0", word) for word in start]
    assert path.startswith("/run/secrets/")
    assert words("ENTRYPOINT") == ["penstock"]
    broker = subprocess.Popen(
        [sys.executable, "-m", "penstock.cli", *start],
        env={**os.environ, "PYTHONPATH": str(ROOT), name: str(secret)},
        stdout=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + START_S
        while not (data / "ports.json").exists():
            assert broker.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        ports = json.loads((data / "ports.json").read_text())["ports"]
        assert set(ports) == {"tcp", "http"}
        probe = words("    CMD")
        assert probe[:2] == ["python", "-c"]
        code = re.sub(r"127\.0\.0\.1:\d+", f"127.0.0.1:{ports['http']}", probe[2])
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    finally:
        broker.terminate()
        assert broker.wait(START_S) == 0
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode


def test_the_ports_it_names_are_those_it_listens_on() -> None:
    listening = re.findall(r"0\.0\.0\.0:(\d+)", FILE)
    (exposed,) = re.findall(r"^EXPOSE (.*)$", FILE, re.MULTILINE)
    assert exposed.split() == listening
    assert f"127.0.0.1:{listening[1]}/health" in FILE

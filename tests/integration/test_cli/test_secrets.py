"""Files with secrets that others can read are warned of; keys of CURVE come from a command (C18)."""

from __future__ import annotations

import signal
from typing import Any

import pytest

SECRET = "0123456789abcdef0123456789abcdef"


def warned(rows: list[dict[str, Any]], path: Any) -> bool:
    secrets = [row for row in rows if row["name"] == "secrets" and str(path) in row["found"]]
    return any(row["status"] == "warn" for row in secrets)


@pytest.mark.parametrize("name", ["auth.jwt_secret_file", "auth.admin_token_file", "config"])
@pytest.mark.parametrize("command", ["doctor", "check"])
def test_a_file_that_others_can_read_is_warned_of(cli: Any, name: str, command: str) -> None:
    path = cli.folder / "secret"
    if name == "config":
        path.write_text(f'[auth]\njwt_secret = "{SECRET}"\n')
        words = ["--config", str(path)]
    else:
        path.write_text(SECRET)
        words = ["--set", f"{name}={path}"]
    act = ["doctor"] if command == "doctor" else ["up", str(cli.data), "--check"]
    for mode, expected in ((0o644, True), (0o640, True), (0o600, False)):
        path.chmod(mode)
        result = cli(*words, "--json", *act)
        assert warned(result.rows, path) == expected, result


def test_a_broker_that_starts_logs_it(cli: Any, wait: Any) -> None:
    path = cli.folder / "secret"
    path.write_text(SECRET)
    path.chmod(0o644)
    zero = [f"--{name}=127.0.0.1:0" for name in ("tcp", "zmq", "pub", "http")]
    process = cli.start("--set", f"auth.jwt_secret_file={path}", "up", str(cli.data), *zero)
    wait((cli.data / "ports.json").exists, "the broker is up")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert f"{path} can be read by others" in err.decode()


def test_keys_of_curve(cli: Any) -> None:
    pair = cli("--json", "key", "create").row
    assert len(pair["public"]) == len(pair["secret"]) == 40
    setting = f"server.curve_secret_key={pair['secret']}"
    found = cli("--json", "--set", setting, "key", "public")
    assert found.row == {"public": pair["public"]}
    assert cli("key", "public").code == 2

"""`penstock up` as a process: start, ports, signals, kill -9, faults, and what `--check` finds."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from penstock.cli import up as up_command
from penstock.cli.invocation import DEFAULT_URL, Invocation
from penstock.testing.authority import Authority

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ANY = ("--tcp", "127.0.0.1:0", "--zmq", "127.0.0.1:0", "--pub", "127.0.0.1:0", "--http", "127.0.0.1:0")  # fmt: skip
TOKEN = ("--set", "auth.admin_token=0123456789abcdef")
DEADLINE_S = 30.0


class Up:
    """A running `penstock up`, and what it said."""

    def __init__(self, process: subprocess.Popen[bytes], data: Path) -> None:
        self.process = process
        self.data = data

    def ports(self) -> dict[str, Any]:
        """What `ports.json` of this very process says, once it is there."""
        path = self.data / "ports.json"
        deadline = time.monotonic() + DEADLINE_S
        while True:
            if path.exists():
                found: dict[str, Any] = json.loads(path.read_text())
                if found["pid"] == self.process.pid:
                    return found
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, "ports.json was not written"
            time.sleep(0.02)

    def end(self, number: int = signal.SIGTERM) -> tuple[int, bytes, str]:
        """Send a signal and wait for the end."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> tuple[int, bytes, str]:
        out, err = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, out, (err or b"").decode()


@pytest.fixture
def up(cli: Any) -> Callable[..., Up]:
    def start(*words: str) -> Up:
        return Up(cli.start("up", str(cli.data), *(words or ANY)), cli.data)

    return start


def get(url: str) -> tuple[int, Any]:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.status, json.loads(answer.read())


# -- start and stop --------------------------------------------------------------------------------


def test_it_says_where_it_listens_and_drains_on_sigterm(cli: Any, up: Callable[..., Up]) -> None:
    """T1: one command starts the broker; port 0 works, is printed and written down."""
    broker = up(*ANY, "--json")
    found = broker.ports()
    assert "tcp" in found["ports"]
    for name, port in found["ports"].items():
        assert port > 0
        assert found["addresses"][name] == f"127.0.0.1:{port}"
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    assert found["urls"]["tcp"] == f"penstock://{found['addresses']['tcp']}"
    code, out, err = broker.end()
    assert code == 0, err
    assert json.loads(out) == found, "what is printed is what is written"
    assert not (cli.data / "ports.json").exists()
    events = [line.split(maxsplit=2)[2].split("  ")[0] for line in err.splitlines()]
    for event in ("starting", "ready", "draining", "stopped"):
        assert events.count(event) == 1, err
    assert cli.ok("doctor", "--json").rows, "nobody holds the folder"


def test_it_is_ready_when_it_says_so(up: Callable[..., Up]) -> None:
    """T16: health and readiness over HTTP, at the address in ports.json."""
    found = up().ports()
    assert get(found["urls"]["http"] + "/ready") == (200, {"ready": True})
    assert get(found["urls"]["http"] + "/health") == (200, {"alive": True})


def test_a_pipe_gets_columns(up: Callable[..., Up]) -> None:
    broker = up()
    found = broker.ports()
    _, out, _ = broker.end(signal.SIGINT)
    lines = out.decode().splitlines()
    assert lines[0].split() == ["service", "address", "url"]
    assert {line.split()[0]: line.split()[2] for line in lines[1:]} == found["urls"]


def test_it_lives_without_a_reader_of_its_output(cli: Any, up: Callable[..., Up]) -> None:
    broker = up()
    broker.process.stdout.close()
    assert broker.ports()
    time.sleep(0.3)
    assert broker.process.poll() is None
    broker.process.send_signal(signal.SIGTERM)
    assert broker.process.wait(DEADLINE_S) == 0


def test_logs_as_json(up: Callable[..., Up]) -> None:
    broker = up(*ANY, "--set", "server.log_format=json")
    broker.ports()
    code, _, err = broker.end()
    assert code == 0
    records = [json.loads(line) for line in err.splitlines()]
    assert {"time", "level", "event", "logger"} <= set(records[0])
    assert [each["service"] for each in records if each["event"] == "listening"]


async def test_killed_and_started_again(up: Callable[..., Up]) -> None:
    """T6: after kill -9 the broker is ready again, and what was acknowledged is there."""
    first = up()
    found = first.ports()
    async with penstock.connect(found["urls"]["tcp"]) as bus:
        receipt = await bus.publish("orders", b"precious", codec="raw")
    first.process.kill()
    first.wait()
    assert (first.data / "ports.json").exists(), "a killed broker cannot clean up"
    second = up()
    again = second.ports()
    async with penstock.connect(again["urls"]["tcp"]) as bus, bus.subscribe("orders", group="g") as events:  # fmt: skip
        async for event in events:
            assert (event.payload, event.offset) == (b"precious", receipt.offset)
            await event.ack()
            break
    assert second.end()[0] == 0


def test_the_second_one_names_the_first(cli: Any, up: Callable[..., Up]) -> None:
    first = up()
    first.ports()
    result = cli("up", str(cli.data), *ANY)
    assert result.code == 6
    assert "storage.locked" in result.stderr
    assert str(first.process.pid) in result.stderr
    assert first.ports()["pid"] == first.process.pid, "its file is untouched"
    result = cli("up", str(cli.data), *ANY, "--check", "--json")
    assert result.code == 6
    assert [row["code"] for row in result.rows if row["status"] == "fail"] == ["storage.locked"]
    assert first.end()[0] == 0


def test_a_port_that_is_taken_is_named_with_its_owner(cli: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = cli("up", str(cli.data), *ANY, "--tcp", f"127.0.0.1:{port}")
    assert result.code == 1
    assert f"127.0.0.1:{port} (server.tcp)" in result.stderr
    assert f"pid {os.getpid()}" in result.stderr
    assert not cli.data.exists(), "nothing was touched"


def test_new_limits_come_with_sighup_and_with_the_file(cli: Any, wait: Any) -> None:
    """T11: the limits of the settings file are in force without a restart."""
    config, log = cli.folder / "penstock.toml", cli.folder / "log"
    config.write_text("[admission]\nmax_global_ingress = 100\n[server]\nlog_format = 'json'\n")
    words = [*cli.words, "--config", str(config), "up", str(cli.data), *ANY]
    with log.open("w") as file:
        process = subprocess.Popen(words, env=cli.env, stdout=subprocess.PIPE, stderr=file)
    cli.running.append(process)
    broker = Up(process, cli.data)
    broker.ports()

    def seen(event: str) -> dict[str, Any]:
        def records() -> list[dict[str, Any]]:
            lines = log.read_text().splitlines()
            return [each for each in map(json.loads, lines) if each["event"] == event]

        wait(lambda: bool(records()), event)
        return records()[-1]

    seen("ready")
    process.send_signal(signal.SIGHUP)
    assert seen("limits unchanged")["why"] == "SIGHUP"
    config.write_text("[admission]\nmax_global_ingress = 200\n[server]\nlog_format = 'json'\n")
    changed = seen("limits changed")
    assert changed["why"] == "the file changed"
    assert changed["changes"] == {"admission.max_global_ingress": [100, 200]}
    config.write_text("[admission]\nmax_global_ingress = 'many'\n")
    process.send_signal(signal.SIGHUP)
    assert "max_global_ingress" in seen("reload refused")["problem"]
    assert broker.end()[0] == 0


# -- faults, with a daemon that behaves as the test wants --------------------------------------------

STAND_IN = """
import asyncio, os, sys, types
from penstock.core.admission import Admission
from penstock.model.errors import WriterFailed
from penstock.server.auth import Authenticator
from penstock.server.reload import limits_of

def wish(name):
    return float(os.environ.get(name, 0))

class Daemon:
    def __init__(self, folder, settings):
        commits = types.SimpleNamespace(failed=None)
        self.engine = types.SimpleNamespace(admission=Admission(limits_of(settings)), commits=commits)
        self.authenticator = Authenticator(settings.auth)
        self.ports = {"tcp": 7}
        self.folder = folder

    def fail(self):
        self.engine.commits.failed = WriterFailed("the disk refused. Check the disk")

    async def start(self):
        self.folder.mkdir(exist_ok=True)
        (self.folder / "starting").touch()
        await asyncio.sleep(wish("START_S"))
        if wish("FAIL_S"):
            asyncio.get_running_loop().call_later(wish("FAIL_S"), self.fail)

    async def stop(self):
        (self.folder / "stopping").touch()
        await asyncio.sleep(wish("STOP_S"))
        if self.engine.commits.failed:
            raise self.engine.commits.failed

module = types.ModuleType("penstock.server.daemon")
module.Daemon = Daemon
sys.modules["penstock.server.daemon"] = module
from penstock.cli import main
main()
"""


@pytest.fixture
def stand_in(cli: Any) -> Iterator[Callable[..., Up]]:
    script = cli.folder / "stand_in.py"
    script.write_text(STAND_IN)

    def start(**wishes: Any) -> Up:
        words = [sys.executable, "-W", "error", str(script), "up", str(cli.data), *ANY]
        env = cli.env | {name: str(value) for name, value in wishes.items()}
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
        cli.running.append(process)
        return Up(process, cli.data)

    return start


def test_a_writer_that_failed_ends_the_broker(stand_in: Callable[..., Up]) -> None:
    code, _, err = stand_in(FAIL_S=0.3).wait()
    assert code == 6
    assert "cannot go on" in err
    assert "storage.writer-failed" in err.splitlines()[-1]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_second_signal_stops_at_once(
    stand_in: Callable[..., Up], wait: Any, number: int, code: int
) -> None:
    broker = stand_in(STOP_S=60)
    broker.ports()
    broker.process.send_signal(signal.SIGTERM)
    wait((broker.data / "stopping").exists, "it drains")
    assert broker.process.poll() is None
    began = time.monotonic()
    ended, _, err = broker.end(number)
    assert time.monotonic() - began < 5
    assert ended == code
    assert "stopping at once" in err, "the last line is written before the end"
    assert not (broker.data / "ports.json").exists()


def test_a_signal_while_it_starts_ends_it(stand_in: Callable[..., Up], wait: Any) -> None:
    broker = stand_in(START_S=60)
    wait((broker.data / "starting").exists, "it starts")
    code, out, err = broker.end()
    assert (code, out) == (0, b"")
    assert "stopped before it was ready" in err
    assert not (broker.data / "ports.json").exists()


def test_what_a_killed_broker_left_is_gone_while_the_next_one_starts(
    cli: Any, stand_in: Callable[..., Up], wait: Any
) -> None:
    cli.data.mkdir()
    (cli.data / "penstock.json").write_text('{"format": 1}')
    (cli.data / "ports.json").write_text("left by a broker that was killed")
    broker = stand_in(START_S=60)
    wait((broker.data / "starting").exists, "it starts")
    assert not (broker.data / "ports.json").exists()
    assert broker.end()[0] == 0


def test_a_drain_that_hangs_is_given_up(cli: Any, stand_in: Callable[..., Up]) -> None:
    script = cli.folder / "stand_in.py"
    script.write_text("import penstock.cli.up\npenstock.cli.up.STOP_GRACE_S = 0.2\n" + STAND_IN)  # fmt: skip
    broker = stand_in(STOP_S=60, PENSTOCK_SERVER_DRAIN_S=0.1)
    broker.ports()
    code, _, err = broker.end()
    assert code == 1
    assert "stopping takes too long" in err


def test_systemd_is_told(cli: Any, stand_in: Callable[..., Up]) -> None:
    path = cli.folder / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(path))
        systemd.settimeout(DEADLINE_S)
        broker = stand_in(NOTIFY_SOCKET=path)
        assert systemd.recv(100) == b"READY=1"
        assert broker.end()[0] == 0
        assert systemd.recv(100) == b"STOPPING=1"


def test_a_broker_that_hangs_is_silent_to_the_watchdog(
    cli: Any, up: Callable[..., Up], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reports for as long as its loop turns, also while it drains (C18)."""
    path = cli.folder / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(path))
        cli.env |= {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "200000"}
        broker = up()
        broker.ports()
        systemd.settimeout(DEADLINE_S)
        heard = [systemd.recv(100) for _ in range(8)]
        assert heard.count(b"READY=1") == 1
        assert heard.count(b"WATCHDOG=1") == 7
        broker.process.send_signal(signal.SIGSTOP)
        systemd.settimeout(0.5)
        with pytest.raises(TimeoutError):
            for _ in range(20):
                systemd.recv(100)
        broker.process.send_signal(signal.SIGCONT)
        assert broker.end()[0] == 0


# -- validating only -------------------------------------------------------------------------------


def test_all_commands_have_the_same_default_folder() -> None:
    assert up_command._folder(Invocation(), None) == Path(DEFAULT_URL)


def test_check_of_a_good_configuration_changes_nothing(cli: Any) -> None:
    result = cli.ok("up", str(cli.data), *ANY, "--check", "--json")
    assert {row["status"] for row in result.rows} == {"ok"}
    names = {row["name"] for row in result.rows}
    assert {"config", "addresses", "access", "tls", "curve", "folder", "format", "lock", "port tcp"} <= names  # fmt: skip
    assert not cli.data.exists()
    assert "the broker can start" in cli.ok("up", str(cli.data), *ANY, "--check").stderr


def test_check_of_a_folder_that_is_used_changes_nothing(cli: Any, hashes_of: Any) -> None:
    cli.ok("publish", "t", "x")
    before = hashes_of(cli.data)
    cli.ok("up", str(cli.data), *ANY, "--check")
    assert hashes_of(cli.data) == before


@pytest.mark.parametrize(
    ("words", "code", "name", "text"),
    [
        (["--tcp", "127.0.0.1"], 2, "addresses", "server.tcp"),
        (["--tcp", "127.0.0.1:70000"], 2, "addresses", "65535"),
        (["--tcp", "127.0.0.1:7", "--zmq", "127.0.0.1:7"], 2, "addresses", "both"),
        (["--tcp", "", "--zmq", "", "--pub", "", "--http", ""], 2, "addresses", "off"),
        (["--tcp", "0.0.0.0:0"], 2, "access", "auth.jwt_secret"),
        (["--pub", "0.0.0.0:0", *TOKEN], 2, "access", "server.curve_clients"),
        (["--set", "auth.jwt_secret=short"], 2, "access", "32"),
        (["--http", "no.such.host.invalid:0", *TOKEN], 1, "port http", "no.such.host.invalid"),
        (["--tcp", "192.0.2.77:0", *TOKEN], 1, "port tcp", "192.0.2.77"),
        (["--set", "server.tls_certificate=missing.pem"], 2, "tls", "missing.pem"),
        (["--set", "server.tls_key=key.pem"], 2, "tls", "tls_certificate"),
        (["--set", "server.curve_secret_key=short"], 2, "curve", "curve_secret_key"),
        (["--set", "server.curve_clients=a"], 2, "curve", "curve_secret_key"),
        (["--set", "server.max_connections=0"], 2, "config", "max_connections"),
        (["--set", "fastpath.require=true", "--set", "fastpath.enabled=false"], 2, "config", "fastpath"),
        (["--set", "telemetry.otlp_endpoint=localhost:4317"], 2, "config", "http://"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)  # fmt: skip
def test_check_finds_what_is_wrong(
    cli: Any, words: list[str], code: int, name: str, text: str
) -> None:
    result = cli("up", str(cli.data), *ANY, *words, "--check", "--json")
    assert result.code == code, result
    failed = {row["name"]: row for row in result.rows if row["status"] == "fail"}
    assert name in failed, result.rows
    assert text in failed[name]["found"]
    assert failed[name]["code"]
    assert cli("up", str(cli.data), *ANY, *words).code == code, "and so ends the broker itself"
    assert not cli.data.exists()


@pytest.mark.parametrize(
    ("make", "code", "text"),
    [
        (lambda path: path.write_text("x"), 6, "no folder"),
        (lambda path: (path.mkdir(), (path / "cat.jpg").touch()), 6, "cat.jpg"),
        (lambda path: (path.mkdir(), (path / "penstock.json").write_text('{"format": 99}')), 6, "99"),
    ],
    ids=["file", "foreign", "newer"],
)  # fmt: skip
def test_check_finds_a_folder_that_is_none(
    cli: Any, make: Callable[[Path], None], code: int, text: str
) -> None:
    make(cli.data)
    result = cli("up", str(cli.data), *ANY, "--check", "--json")
    assert result.code == code
    assert any(text in row["found"] for row in result.rows if row["status"] == "fail")


@pytest.fixture
def certificate(cli: Any) -> Callable[[int], tuple[str, str]]:
    """Makes a certificate that is valid for some days from now, and its key."""

    def make(days: int) -> tuple[str, str]:
        import datetime

        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
        now = datetime.datetime.now(datetime.UTC)
        made = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(1)
            .not_valid_before(now - datetime.timedelta(days=100))
            .not_valid_after(now + datetime.timedelta(days=days))
            .sign(key, hashes.SHA256())
        )
        pem = serialization.Encoding.PEM
        files = cli.folder / f"cert{days}.pem", cli.folder / f"key{days}.pem"
        files[0].write_bytes(made.public_bytes(pem))
        kind = serialization.PrivateFormat.PKCS8
        files[1].write_bytes(key.private_bytes(pem, kind, serialization.NoEncryption()))
        files[1].chmod(0o600)
        return str(files[0]), str(files[1])

    return make


def test_a_key_with_a_password_ends_the_broker_with_an_error(cli: Any, tmp_path: Path) -> None:
    """Q1: at a terminal, too, where OpenSSL would ask for the password and wait."""
    certificate, key = Authority(tmp_path, "authority").issue("locked", password=b"a password")
    settings = ("--set", f"server.tls_certificate={certificate}", "--set", f"server.tls_key={key}")
    at_a_terminal = (
        "import fcntl, os, sys, termios\n"
        "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
        "os.execv(sys.executable, [sys.executable, '-m', 'penstock.cli', *sys.argv[1:]])"
    )
    ours, terminal = os.openpty()
    with os.fdopen(ours, "rb", buffering=0), os.fdopen(terminal, "rb", buffering=0) as stdin:
        done = subprocess.run(
            [sys.executable, "-c", at_a_terminal, *settings, "up", str(cli.data), *ANY],
            stdin=stdin, capture_output=True, env=cli.env, start_new_session=True,
            timeout=DEADLINE_S, check=False,
        )  # fmt: skip
    assert done.returncode == 2
    assert b"server.tls_key" in done.stderr
    assert b"without a password" in done.stderr


def test_check_reads_certificates(cli: Any, certificate: Any) -> None:
    def status(cert: str, key: str) -> tuple[int, str]:
        settings = ("--set", f"server.tls_certificate={cert}", "--set", f"server.tls_key={key}")
        result = cli("up", str(cli.data), *ANY, *settings, "--check", "--json")
        return result.code, next(row["status"] for row in result.rows if row["name"] == "tls")

    good, soon, expired = certificate(90), certificate(5), certificate(-1)
    assert status(*good) == (0, "ok")
    assert status(*soon) == (0, "warn")
    assert status(*expired) == (2, "fail")
    assert status(good[0], soon[1]) == (2, "fail"), "a key of another certificate"
    Path(good[1]).chmod(0o644)
    settings = ("--set", f"server.tls_certificate={good[0]}", "--set", f"server.tls_key={good[1]}")
    result = cli.ok("up", str(cli.data), *ANY, *settings, "--check")
    assert "can be read by others" in result.text

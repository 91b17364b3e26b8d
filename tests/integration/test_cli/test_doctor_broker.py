"""`penstock doctor` on a broken machine: each fault is found, named and comes with advice (T16)."""

from __future__ import annotations

import asyncio
import csv
import importlib.util
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import namedtuple
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

import penstock
from penstock.cli import checks as checks_module
from penstock.log.disk import RealDisk
from penstock.model.errors import ConnectionFailed, MissingExtra
from penstock.model.settings import Journal, Sealing, Server, Settings, Telemetry
from penstock.server.ports import Address, listening, write_ports
from penstock.testing.authority import Authority
from penstock.testing.broker_process import broker_inside

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

OFF = ("--set", "server.zmq=", "--set", "server.pub=", "--set", "server.http=", "--set", "server.tcp=127.0.0.1:0")  # fmt: skip


def found(result: Any, name: str) -> dict[str, Any]:
    return next(row for row in result.rows if row["name"] == name)


# -- the machine -----------------------------------------------------------------------------------


def test_a_port_that_is_taken(cli: Any) -> None:
    """T16: a port in use is named with its owner; a failure only where somebody asked for it."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        address = f"127.0.0.1:{port}"
        result = cli("doctor", *OFF, "--set", f"server.tcp={address}", "--json")
        settings = Settings(server=Server(zmq="", pub="", http="", tcp=address))
        (by_default,) = checks_module.check_ports(settings, None)
    assert result.code == 1
    row = found(result, "port tcp")
    assert row["status"] == "fail"
    assert f"taken by pid {os.getpid()}" in row["found"]
    assert "--tcp" in row["advice"]
    assert by_default.status == "warn"
    assert checks_module.check_port("tcp", Address("127.0.0.1", port)).status == "ok", "free again"


def test_the_ports_of_the_broker_that_is_asked(cli: Any) -> None:
    """T16: a client is not told to stop its broker for having the default ports; written ones count."""
    place = ["--url", "penstock://127.0.0.1:1"]  # nobody answers: what is said of ports is the same
    names = [row["name"] for row in cli(*place, "doctor", "--json").rows]
    assert not [name for name in names if name.startswith("port ")]
    assert "addresses" in names
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        result = cli(*place, "doctor", "--set", f"server.tcp={address}", "--json")
    row = found(result, "port tcp")
    assert (row["status"], address in row["found"]) == ("fail", True)
    assert any(row["name"] == "port tcp" for row in cli("doctor", "--json").rows)


def test_an_address_of_another_machine() -> None:
    with pytest.raises(ConnectionFailed, match="address of this machine"):
        checks_module.check_port("tcp", Address("192.0.2.1", 0))


def _without(real: Any, missing: str, name: str) -> Any:
    """A module that is not there, in a package that is not there either."""
    if name == missing:
        raise ModuleNotFoundError(name)
    return real(name)


def test_a_missing_extra_says_who_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "uvicorn" else real(name)
    )
    with pytest.raises(MissingExtra, match=r"uvicorn.*server\.http.*pip install 'penstock\[server\]'"):  # fmt: skip
        checks_module.check_needed(Settings())
    assert checks_module.check_needed(Settings(server=Server(http=""))).status == "ok"
    traced = Settings(
        server=Server(http=""), telemetry=Telemetry(otlp_endpoint="http://127.0.0.1:4318")
    )
    for missing in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
        monkeypatch.setattr(importlib.util, "find_spec", partial(_without, real, missing))
        with pytest.raises(MissingExtra, match=r"telemetry\.otlp_endpoint.*penstock\[tracing\]"):
            checks_module.check_needed(traced)
    monkeypatch.setattr(
        checks_module, "_installed", lambda name: None if name == "uvicorn" else "1"
    )
    extra = next(check for check in checks_module.check_extras() if check.name == "extra server")
    assert "uvicorn" in extra.found
    assert "pip install 'penstock[server]'" in extra.advice
    assert "penstock up" in extra.advice


def test_the_doctor_finds_that_tracing_is_not_installed(cli: Any) -> None:
    """T16: an endpoint for spans, which is no setting of the server, needs an extra as well."""
    gone = "".join(f"sys.modules[{name!r}] = None\n" for name in checks_module.TRACING)
    (cli.folder / "sitecustomize.py").write_text(f"import sys\n{gone}")
    cli.env["PYTHONPATH"] = f"{cli.folder}:{cli.env['PYTHONPATH']}"
    result = cli("doctor", "--set", "telemetry.otlp_endpoint=http://127.0.0.1:4318", "--json")
    assert result.code == 1
    row = found(result, "needed extras")
    assert row["status"] == "fail"
    assert "telemetry.otlp_endpoint" in row["found"]
    assert "penstock[tracing]" in row["found"] + row["advice"]


def test_the_certificate_a_client_shows(cli: Any) -> None:
    """T16: its files are looked at before a broker that asks for them shuts the door."""
    authority = Authority(cli.folder, "authority")
    certificate, key = authority.issue("client")
    other, _ = authority.issue("other")

    def examined(**fields: str) -> dict[str, Any]:
        words = [f"client.{name}={value}" for name, value in fields.items()]
        result = cli("doctor", *(x for word in words for x in ("--set", word)), "--json")
        row = found(result, "client tls")
        assert result.code == (row["status"] == "fail")
        return row

    assert "brokers are checked" in examined(tls_ca=authority.ca_file)["found"]
    # Signed for a day, so it is about to expire.
    row = examined(tls_certificate=certificate, tls_key=key)
    assert (row["status"], "CN=client" in row["found"]) == ("warn", True)
    row = examined(tls_certificate="missing.pem", tls_key=key)
    assert (row["status"], row["code"]) == ("fail", "invalid.settings")
    assert "client.tls_certificate = 'missing.pem' cannot be read" in row["found"]
    assert "belong together" in examined(tls_certificate=other, tls_key=key)["found"]
    assert not [row for row in cli("doctor", "--json").rows if row["name"] == "client tls"]
    half = cli("config", "check", "--set", f"client.tls_key={key}")
    assert half.code == 2
    assert "client.tls_key needs client.tls_certificate" in half.text


def test_too_few_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(server=Server(max_connections=5_000))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1_024, 4_096))
    low = checks_module.check_descriptors(settings)
    assert low.status == "warn"
    assert "LimitNOFILE=6024" in low.advice
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1_024, 8_192))
    assert checks_module.check_descriptors(settings).status == "ok", "the broker raises it itself"


def test_the_broker_raises_its_limit_of_open_files(cli: Any) -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 1024))\n"
        "from penstock.server.readiness import raise_limit as up\n"
        "from penstock.model.settings import Settings\n"
        "up(Settings()); print(resource.getrlimit(resource.RLIMIT_NOFILE))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=cli.env, capture_output=True, check=True)  # fmt: skip
    assert done.stdout == b"(1024, 1024)\n"


def test_a_clock_that_jumps(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = checks_module.ClockWatch()
    assert watch.check().status == "ok"
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() - 3_600 * 10**9)
    jumped = watch.check()
    assert jumped.status == "warn"
    assert "-3600.0 s" in jumped.found
    monkeypatch.setattr(time, "time_ns", lambda: 10**9)
    assert "1970" in watch.check().found


# -- the disk --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times_ms", "status", "word"),
    [
        ([0.5] * 200, "ok", ""),
        ([30.0] * 50, "warn", "faster disk"),
        ([0.5] * 195 + [400.0] * 5, "warn", "one commit in a hundred"),
        ([0.001] * 200, "ok", "note: too fast"),
    ],
)
def test_the_disk_is_judged_by_its_syncs(times_ms: list[float], status: str, word: str) -> None:
    """T16: slow, uneven, and too fast to be true."""
    check = checks_module.judge_syncs(times_ms)
    assert check.status == status
    assert word in check.advice
    assert "p99" in check.found


def test_syncs_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda fd: (time.sleep(0.05), real(fd)))
    monkeypatch.setattr(checks_module, "SYNC_TIME_S", 0.2)
    times_ms = checks_module.measure_syncs(tmp_path)
    assert min(times_ms) >= 50
    assert checks_module.LEAST_SYNCS <= len(times_ms) < 10, "a slow disk is asked less often"
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    settings = Settings(journal=Journal(file_bytes=1 << 30))
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(100 << 30, 0, 1 << 29))
    full = checks_module.check_space(tmp_path, settings)
    assert (full.status, "1 GiB" in full.advice) == ("fail", True)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(100 << 30, 0, 2 << 30))
    assert checks_module.check_space(tmp_path, settings).status == "warn"


# -- the folder ------------------------------------------------------------------------------------


def test_formats_older_and_newer(cli: Any) -> None:
    cli.ok("publish", "t", "x")
    about = cli.data / "penstock.json"
    about.write_text('{"format": 0}')
    row = found(cli("doctor", *OFF, "--json"), "format")
    assert (row["status"], "copy the folder" in row["advice"]) == ("warn", True)
    about.write_text('{"format": 99}')
    row = found(cli("doctor", *OFF, "--json"), "format")
    assert (row["status"], row["code"]) == ("fail", "storage.format-too-new")


async def test_a_journal_that_is_not_sealed(tmp_path: Path, small: Callable[..., Settings]) -> None:
    settings = small(sealing__enabled=False, sealing__backlog_max_bytes=4 << 20)
    async with penstock.connect(tmp_path / "data", settings=settings) as bus:
        for _ in range(5):
            await bus.publish_many("t", [os.urandom(1_000) for _ in range(600)], codec="raw")

    def backlog(settings: Settings) -> checks_module.Check:
        checks = checks_module.check_log(tmp_path / "data", settings)
        return next(check for check in checks if check.name == "backlog")

    assert "sealing is off" in backlog(settings).found
    sealing = msgspec.structs.replace(settings.sealing, enabled=True)
    waiting = backlog(msgspec.structs.replace(settings, sealing=sealing))
    assert (waiting.status, "start a writer" in waiting.advice) == ("warn", True)
    assert "MiB not sealed" in waiting.found
    lock = RealDisk(tmp_path / "data").lock()
    busy = backlog(msgspec.structs.replace(settings, sealing=sealing))
    assert (busy.status, "keep up" in busy.advice) == ("warn", True)
    lock.release()
    assert backlog(msgspec.structs.replace(settings, sealing=Sealing())).status == "ok"


def test_an_audit_chain_that_was_changed(cli: Any) -> None:
    cli.ok("topic", "create", "orders")
    cli.ok("topic", "delete", "orders", "--confirm", "DELETE")
    assert found(cli.ok("doctor", *OFF, "--json"), "audit")["status"] == "ok"
    changed = 0
    for path in (cli.data / "audit").rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        if b"orders" in data:
            path.write_bytes(data.replace(b"orders", b"others"))
            changed += 1
    assert changed
    result = cli("doctor", *OFF, "--json")
    assert result.code == 1
    assert found(result, "audit")["status"] == "fail"


# -- a broker --------------------------------------------------------------------------------------


class Answers(BaseHTTPRequestHandler):
    """Answers /health and /ready as the test wants."""

    status = {"/health": 200, "/ready": 200}

    def do_GET(self) -> None:
        self.send_response(self.status[self.path])
        self.end_headers()
        self.wfile.write(b'{"said":\n "this"}')

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A folder with a holder and with ports that lead to `Answers`."""
    monkeypatch.setattr(Answers, "status", {"/health": 200, "/ready": 200})
    folder = tmp_path / "data"
    folder.mkdir()
    lock = RealDisk(folder).lock()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    write_ports(folder, listening(Server(), {"http": server.server_port}, "1"))
    yield folder, server, lock
    server.shutdown()
    server.server_close()
    lock.release()


def status_of(folder: Path) -> dict[str, tuple[str, str]]:
    return {check.name: (check.status, check.found) for check in checks_module.check_broker(folder)}  # fmt: skip


def test_a_running_broker_is_asked(served: Any) -> None:
    folder, _, _ = served
    assert {name: status for name, (status, _) in status_of(folder).items()} == {
        "broker clock": "ok",
        "broker /health": "ok",
        "broker /ready": "ok",
    }
    assert '{"said": "this"}' in status_of(folder)["broker /health"][1]


def test_a_broker_that_is_not_well(served: Any) -> None:
    folder, _, _ = served
    Answers.status |= {"/health": 500, "/ready": 503}
    statuses = status_of(folder)
    assert statuses["broker /health"][0] == "fail"
    assert statuses["broker /ready"][0] == "warn"
    assert "503" in statuses["broker /ready"][1]


def test_a_broker_that_does_not_answer(served: Any) -> None:
    folder, server, _ = served
    server.shutdown()
    server.server_close()
    assert status_of(folder)["broker /health"][0] == "fail"


def test_a_broker_that_hangs(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _, _ = served
    monkeypatch.setattr(checks_module, "ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        write_ports(folder, listening(Server(), {"http": silent.getsockname()[1]}, "1"))
        began = time.monotonic()
        status, text = status_of(folder)["broker /health"]
    assert (status, time.monotonic() - began < 5) == ("fail", True)
    assert "does not answer" in text


def test_a_broker_that_was_killed(served: Any) -> None:
    folder, _, lock = served
    lock.release()
    status, text = status_of(folder)["broker"]
    assert (status, "killed" in text) == ("warn", True)


def test_a_clock_that_was_moved_while_the_broker_ran(served: Any) -> None:
    folder, server, _ = served
    record = listening(Server(), {"http": server.server_port}, "1")
    early = msgspec.structs.replace(record, since_us=record.since_us + 3_600_000_000)
    write_ports(folder, early)
    status, text = status_of(folder)["broker clock"]
    assert (status, "-3600 s" in text) == ("warn", True)


def test_what_listens_elsewhere_and_is_no_broker(cli: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        url = f"penstock://127.0.0.1:{other.getsockname()[1]}"
        assert found(cli("--url", url, "doctor", *OFF, "--json"), "broker")["status"] == "fail"
    result = cli("--url", url, "doctor", *OFF, "--json")
    assert result.code == 1
    assert found(result, "broker")["status"] == "fail"


def test_the_real_broker_is_examined_while_it_runs(cli: Any, wait: Any) -> None:
    any_port = [f"--{name}=127.0.0.1:0" for name in ("tcp", "zmq", "pub", "http")]
    process = cli.start("up", str(cli.data), *any_port)
    wait((cli.data / "ports.json").exists, "the broker is up")
    record = json.loads((cli.data / "ports.json").read_text())
    own = ("--set", f"server.tcp={record['addresses']['tcp']}")
    result = cli("doctor", str(cli.data), *OFF, *own, "--json")
    assert result.code == 0, result
    assert f"pid {process.pid}" in found(result, "port tcp")["found"]
    assert str(process.pid) in found(result, "lock")["found"]
    assert found(result, "broker /health")["status"] == "ok"
    assert found(result, "broker /ready")["status"] == "ok"
    remote = cli("--url", record["urls"]["tcp"], "doctor", *OFF, "--json")
    assert "lets us in" in found(remote, "broker")["found"]
    assert found(remote, "clock skew")["status"] == "ok"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert found(cli.ok("doctor", str(cli.data), *OFF, "--json"), "broker")["found"] == "not running"  # fmt: skip


@pytest.mark.parametrize("hours", [-1, 1])
async def test_a_broker_whose_clock_is_not_ours(tmp_path: Path, hours: int) -> None:
    """T16: events have the broker's time, so a difference is named, with who is ahead."""
    daemon = broker_inside(tmp_path, {})
    await daemon.start()
    clock = daemon.engine.runtime.wall_us
    daemon.engine.runtime.wall_us = lambda: clock() + hours * 3_600_000_000
    try:
        url = f"penstock://127.0.0.1:{daemon.ports['tcp']}"
        look = partial(checks_module.check_remote, url, Settings())
        _, skew = await asyncio.to_thread(lambda: list(look()))
    finally:
        await daemon.stop()
    assert (skew.name, skew.status) == ("clock skew", "warn")
    [found_s] = re.findall(r"([+-][0-9.]+) s", skew.found)
    # The answer's way is part of it: on a busy machine that is more than nothing.
    assert float(found_s) == pytest.approx(hours * 3600, abs=5)
    assert "NTP" in skew.advice


# -- rehearsal and export --------------------------------------------------------------------------


@pytest.fixture
def busy(cli: Any) -> Any:
    """A folder in which two tenants published."""
    for tenant, count in (("acme", 40), ("calm", 3)):
        lines = b"x\n" * count
        cli.ok("publish", f"shop.orders.v1.{tenant}", "--lines", input=lines)
    (cli.folder / "new.toml").write_text("[admission.tenants.acme]\nevents_per_s = 10\n")
    return cli


def test_a_quota_is_rehearsed_and_not_applied(busy: Any, hashes_of: Any) -> None:
    """T16, T11: what the new limits would have refused, tenant by tenant; nothing changes."""
    before = hashes_of(busy.data)
    rows = {row["tenant"]: row for row in busy.ok("doctor", "--simulate", "new.toml", "--json").rows}  # fmt: skip
    assert rows["acme"]["events"] == 40
    assert rows["acme"]["now"]["admitted"] == 40
    assert (rows["acme"]["new"]["admitted"], rows["acme"]["new"]["throttled"]) == (10, 30)
    assert rows["acme"]["new"]["limits"] == {"events_per_s": 30}
    assert rows["calm"]["new"]["admitted"] == 3
    assert hashes_of(busy.data) == before
    text = busy.ok("doctor", "--simulate", "new.toml").text
    assert "0 -> 30" in text
    assert "nothing was applied" in text


def test_the_limits_in_force_are_those_of_the_broker(busy: Any) -> None:
    (busy.folder / "now.toml").write_text("[admission.tenants.acme]\nmax_ingress = 30\n")
    result = busy.ok("--config", "now.toml", "doctor", "--simulate", "new.toml", "--json")
    (row,) = [row for row in result.rows if row["tenant"] == "acme"]
    assert (row["now"]["deferred"], row["now"]["limits"]) == (10, {"max_ingress": 10})
    assert "max_ingress" not in row["new"]["limits"], "the new file says nothing about it"


def test_a_rehearsal_needs_a_good_file_and_a_folder(busy: Any) -> None:
    (busy.folder / "bad.toml").write_text("[admission]\nmax_global_ingress = 0\n")
    assert busy("doctor", "--simulate", "bad.toml").code == 2
    assert busy("doctor", "--simulate", "missing.toml").code == 2
    assert busy("--url", "mem:", "doctor", "--simulate", "new.toml").code == 2
    assert busy("--url", "elsewhere", "doctor", "--simulate", "new.toml").code == 6


def test_results_are_exported(busy: Any) -> None:
    """T16: each run adds a line to the bundle, a rehearsal too."""
    trend = busy.folder / "trend"
    busy.ok("doctor", *OFF, "--export", str(trend))
    busy("doctor", *OFF, "--export", str(trend), "--set", "durability.fsync=never")
    busy.ok("doctor", "--simulate", "new.toml", "--export", str(trend))
    first, second, third = json.loads((trend / "trend_bundle.json").read_text())["entries"]
    assert (first["mode"], third["mode"]) == ("check", "simulate")
    assert (first["checks"]["config"], second["checks"]["config"]) == ("ok", "warn")
    assert first["hashes"]["settings"] != second["hashes"]["settings"]
    assert third["simulation"] == {"events": 43, "refused_now": 0, "refused_new": 30}
    assert len(third["hashes"]["proposed"]) == 64
    with (trend / "trend_bundle.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["mode"] for row in rows] == ["check", "check", "simulate"]
    assert rows[0]["check.disk"] == "ok"
    assert rows[2]["simulation.refused_new"] == "30"

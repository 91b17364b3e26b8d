"""`penstock config`, `penstock doctor`, `penstock bench`."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib

from penstock.model.settings import Settings
from penstock.model.settings_loader import check, load


def test_config_check_lists_everything(cli):
    path = cli.folder / "penstock.toml"
    path.write_text('[durability]\nfsync = "sometimes"\n[delivery]\nmax_atempts = 3\n')
    result = cli("config", "check", "penstock.toml")
    assert result.code == 2
    assert len(result.text.splitlines()) == 2
    assert "durability.fsync" in result.text
    assert "delivery.max_attempts" in result.text, "the nearest name is offered"
    rows = cli("config", "check", "penstock.toml", "--json").rows
    assert {row["key"] for row in rows} == {"durability.fsync", "delivery.max_atempts"}
    path.write_text('[durability]\nfsync = "never"\n')
    assert cli("--config", "penstock.toml", "config", "check").code == 0
    assert cli("config", "check", env={"PENSTOCK_DURABILITY_FSYNC": "x"}).code == 2
    missing = cli("config", "check", "missing.toml")
    assert missing.code == 2
    assert missing.text.startswith("error: file missing.toml: cannot read")


def test_config_show_says_where_each_value_comes_from(cli):
    (cli.folder / "p.toml").write_text(
        '[durability]\nfsync = "never"\n[admission.tenants.acme]\nevents_per_s = 5\n[delivery]\nlease_s = "1m"\n'
    )
    result = cli(
        "--config", "p.toml", "--set", "delivery.lease_s=2m", "config", "show", "--json",
        env={"PENSTOCK_MEDIA_CODEC": "msgpack"},
    )  # fmt: skip
    rows = {row["key"]: row for row in result.rows}
    assert rows["durability.fsync"] == {
        "key": "durability.fsync",
        "value": "never",
        "source": "file p.toml",
    }
    assert (rows["delivery.lease_s"]["value"], rows["delivery.lease_s"]["source"]) == (
        120.0,
        "flag",
    )
    assert rows["media.codec"]["source"] == "environment PENSTOCK_MEDIA_CODEC"
    assert rows["admission.tenants.acme.events_per_s"]["value"] == 5
    assert rows["journal.file_bytes"]["source"] == "default"
    text = cli("--config", "p.toml", "config", "show", "--changed").text
    assert "durability.fsync" in text
    assert "journal.file_bytes" not in text


def test_config_example_is_the_defaults(cli):
    text = cli.ok("config", "example").text
    assert tomllib.loads(text) == {group: {} for group in Settings.__struct_fields__}
    path = cli.folder / "example.toml"
    lines = [
        line for line in text.splitlines() if "tenants" not in line and "events_per_s" not in line
    ]
    path.write_text(
        "\n".join(line if line.startswith("# ") else line.removeprefix("#") for line in lines)
    )
    assert [str(problem) for problem in check(str(path))] == []
    assert load(str(path)) == Settings()
    assert tomllib.loads(path.read_text())["delivery"]["max_attempts"] == 5


def statuses(result) -> dict[str, str]:
    return {row["name"]: row["status"] for row in result.rows}


def test_doctor_of_a_healthy_folder(cli):
    cli.ok("publish", "t", "--lines", input=b"x\n" * 1000)
    before = sorted(str(path) for path in cli.data.rglob("*"))
    result = cli("doctor", "--deep", "--json")
    assert result.code == 0, result
    found = statuses(result)
    for name in (
        "python",
        "packages",
        "config",
        "folder",
        "space",
        "format",
        "lock",
        "log",
        "clock",
        "segments",
        "audit",
    ):
        assert found[name] == "ok", result.rows
    disk = next(row for row in result.rows if row["name"] == "disk")
    assert "median of 20" in disk["found"]
    assert sorted(str(path) for path in cli.data.rglob("*")) == before, "nothing is left behind"
    assert "checks: 0 failed" in cli.ok("doctor").text


def test_doctor_names_the_writer(cli, wait):
    process = cli.start("publish", "t", "--lines")
    process.stdin.write(b"x\n")
    process.stdin.flush()
    wait(lambda: cli.count("t") == 1, "the writer has the folder")
    lock = next(row for row in cli.ok("doctor", "--json").rows if row["name"] == "lock")
    assert str(process.pid) in lock["found"]
    process.communicate(timeout=30)
    lock = next(row for row in cli.ok("doctor", "--json").rows if row["name"] == "lock")
    assert lock["found"] == "no writer"


def test_doctor_before_the_first_publish(cli):
    result = cli("doctor", "--json")
    assert result.code == 0
    assert statuses(result)["folder"] == "warn"


def test_doctor_finds_what_is_wrong(cli):
    cli.ok("publish", "t", "x")
    assert cli("doctor", env={"PENSTOCK_DURABILITY_FSYNC": "x"}).code == 1
    about = cli.data / "penstock.json"
    about.write_text(json.dumps({"format": 99}))
    result = cli("doctor", "--json")
    assert result.code == 1
    assert statuses(result)["format"] == "fail"
    foreign = cli.folder / "photos"
    foreign.mkdir()
    (foreign / "cat.jpg").write_text("x")
    assert cli("--url", str(foreign), "doctor").code == 1


def test_doctor_notices_a_clock_behind_the_log(cli):
    code = (
        "import asyncio, time, penstock; real = time.time_ns; time.time_ns = lambda: real() + 3600 * 10**9\n"
        "async def main():\n"
        "    async with penstock.connect('data') as bus: await bus.publish('t', b'x')\n"
        "asyncio.run(main())"
    )
    subprocess.run(
        [sys.executable, "-c", code], cwd=cli.folder, env=cli.env, check=True, timeout=60
    )
    result = cli("doctor", "--json")
    assert result.code == 0
    assert statuses(result)["clock"] == "warn"


def test_bench_list_and_compare(cli):
    rows = cli.ok("bench", "list", "--json").rows
    assert all({"case", "title", "unit", "peers"} <= set(row) for row in rows)
    for name, per_s in (("a", 100.0), ("b", 200.0)):
        result = {
            "case": "c", "penstock": {"per_s": per_s}, "peers": {}, "ratio": {},
            "samples": {"penstock": [{"per_s": per_s}] * 3},
        }  # fmt: skip
        (cli.folder / f"{name}.json").write_text(json.dumps(result))
    change = cli.ok("bench", "compare", "a.json", "b.json", "--json").row
    assert change["cases"][0]["metrics"][0]["verdict"] == "better"
    assert "better" in cli.ok("bench", "compare", "a.json", "b.json").text
    assert cli("bench", "compare", "a.json", "missing.json").code == 2


def test_bench_run(cli):
    result = cli.ok("bench", "run", "publish-serial", "--seconds", "0.2", "--rounds", "1", "--json")
    assert result.row["case"] == "publish-serial"
    assert result.row["penstock"]["per_s"] > 0
    assert cli("bench", "run", "publish-serial", "--vs", "nobody").code == 2
    assert not list(cli.folder.glob(".penstock-bench-*"))

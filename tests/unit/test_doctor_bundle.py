"""Trend bundles of `penstock doctor`: entries are added, columns grow, secrets stay out."""

from __future__ import annotations

import csv
import json
from typing import TYPE_CHECKING

import pytest

from penstock.cli import doctor
from penstock.cli.checks import Check
from penstock.cli.doctor import config_hashes, entry_of, export, read_bundle
from penstock.model.errors import Corrupted
from penstock.model.settings import Auth, Delivery, Settings

if TYPE_CHECKING:
    from pathlib import Path


def test_entries_are_added_and_columns_grow(tmp_path: Path) -> None:
    """T16: time UTC, mode, status, each check's status and config hashes, as JSON and CSV."""
    folder = tmp_path / "made" / "here"
    export(folder, entry_of("check", [Check("disk", "ok", "")], {"settings": "abc"}))
    checks = [Check("config", "ok", ""), Check("config", "fail", ""), Check("lag, all", "warn", "")]
    export(folder, entry_of("deep", checks, {"settings": "abd"}))
    entries = json.loads((folder / "trend_bundle.json").read_text())["entries"]
    assert [entry["status"] for entry in entries] == ["ok", "fail"]
    assert entries[1]["checks"] == {"config": "fail", "lag, all": "warn"}, "the worst counts"
    with (folder / "trend_bundle.csv").open() as file:
        first, second = csv.DictReader(file)
    assert first["time"].endswith("Z")
    assert (first["mode"], second["mode"]) == ("check", "deep")
    assert (first["check.disk"], first["check.config"]) == ("ok", "")
    assert (second["check.disk"], second["check.lag, all"]) == ("", "warn")
    assert (first["sha256.settings"], second["sha256.settings"]) == ("abc", "abd")
    assert sorted(path.name for path in folder.iterdir()) == ["trend_bundle.csv", "trend_bundle.json"]  # fmt: skip


@pytest.mark.parametrize("text", ["", "[]", '{"entries": 1}', '{"format": 99}', "not json"])
def test_what_is_no_bundle_is_not_overwritten(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trend_bundle.json"
    path.write_text(text)
    with pytest.raises(Corrupted, match="Nothing was changed"):
        export(tmp_path, entry_of("check", [], {}))
    assert path.read_text() == text


def test_a_bundle_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MAX_ENTRIES", 3)
    for number in range(5):
        export(tmp_path, entry_of(str(number), [], {}))
    assert [entry.mode for entry in read_bundle(tmp_path).entries] == ["2", "3", "4"]


def test_hashes_follow_settings_and_not_secrets(tmp_path: Path) -> None:
    plain = config_hashes(Settings(), None, None)
    assert config_hashes(Settings(auth=Auth(admin_token="geheim")), None, None) == plain
    assert config_hashes(Settings(delivery=Delivery(lease_s=5)), None, None) != plain
    file = tmp_path / "p.toml"

    def hashed(text: str) -> str:
        file.write_text(text)
        return config_hashes(None, str(file), None)["config"]

    first = hashed("[delivery]\nlease_s = 5\n[auth]\nadmin_token = 'a'\n")
    assert hashed("[delivery]\nlease_s = 5\n[auth]\nadmin_token = 'b'\n") == first
    assert hashed("# a comment\n[delivery]\nlease_s = 5\n") == first
    assert hashed("[delivery]\nlease_s = 6\n") != first
    assert hashed("[") == "unreadable"
    (tmp_path / "routes.json").write_text("{}")
    assert len(config_hashes(None, None, tmp_path)["routes"]) == 64

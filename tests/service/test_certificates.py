"""Files that a server cannot encrypt with: each is told before it starts, with the argument that names it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from samplebatch.errors import ArgumentError
from samplebatch.service import ReplayClient, ReplayServer, ReplayTable
from samplebatch.service.server import find_expiry, read_pair

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made by openssl")


def openssl(folder: Path, command: str) -> None:
    subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a certificate and its key, and invalid variants."""
    folder = tmp_path_factory.mktemp("tls")
    named = "-subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    openssl(folder, f"req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -days 2 {named}")
    openssl(folder, "req -new -key key.pem -out request.pem -subj /CN=localhost")
    openssl(folder, "x509 -req -in request.pem -signkey key.pem -days -1 -out expired.pem")
    openssl(folder, "genrsa -out other.pem 2048")
    openssl(folder, "ecparam -name prime256v1 -genkey -noout -out curve.pem")
    openssl(folder, "rsa -aes256 -passout pass:word -in key.pem -out encrypted.pem")
    openssl(folder, "x509 -in cert.pem -outform der -out cert.der")
    for name in ("cert", "key"):
        text = (folder / f"{name}.pem").read_text()
        (folder / f"damaged_{name}.pem").write_text(text.replace("\nMII", "\nAAA"))
    (folder / "empty.pem").touch()
    return folder


FAULTS = [
    ("cert.der", "key.pem", "tls[0] must be a file with a PEM certificate, got none in 'cert.der'"),
    ("empty.pem", "key.pem", "tls[0] must be a file with a PEM certificate, got none in 'empty.pem'"),
    ("key.pem", "cert.pem", "tls[0] must be a file with a PEM certificate, got none in 'key.pem'"),
    (
        "damaged_cert.pem",
        "key.pem",
        "tls[0] must be a file with a PEM certificate, got a damaged one in 'damaged_cert.pem'",
    ),
    ("cert.pem", "cert.pem", "tls[1] must be a file with a PEM private key, got none in 'cert.pem'"),
    (
        "cert.pem",
        "damaged_key.pem",
        "tls[1] must be a file with a PEM private key, got a damaged one in 'damaged_key.pem'",
    ),
    (
        "cert.pem",
        "other.pem",
        "tls[1] must be the private key of the certificate in 'cert.pem', got the key of another in 'other.pem'",
    ),
    (
        "cert.pem",
        "curve.pem",
        "tls[1] must be the private key of the certificate in 'cert.pem', got the key of another in 'curve.pem'",
    ),
    (
        "cert.pem",
        "encrypted.pem",
        "tls[1] must be a private key without a passphrase, got an encrypted one in 'encrypted.pem'",
    ),
]


@pytest.mark.parametrize(("certificate", "key", "sentence"), FAULTS)
def test_a_server_reports_the_invalid_certificate_or_key_file(
    files: Path, monkeypatch: pytest.MonkeyPatch, certificate: str, key: str, sentence: str
) -> None:
    monkeypatch.chdir(files)
    with pytest.raises(ArgumentError) as caught:
        ReplayServer([ReplayTable("replay", capacity=10)], tls=(certificate, Path(key)))
    assert sentence in str(caught.value)


@pytest.mark.parametrize(("position", "actual"), [(0, "No such file or directory"), (1, "Is a directory")])
def test_an_unreadable_file_is_reported_with_its_argument(files: Path, position: int, actual: str) -> None:
    paths = [str(files / "cert.pem"), str(files / "key.pem")]
    paths[position] = str(files if position else files / "nowhere.pem")
    with pytest.raises(OSError, match=rf"tls\[{position}\] must be a file that can be read, got {actual}") as caught:
        read_pair((paths[0], paths[1]))
    assert caught.value.filename == paths[position]


def test_a_short_key_is_accepted_when_it_is_read(tmp_path: Path) -> None:
    openssl(tmp_path, "req -x509 -newkey rsa:1024 -nodes -keyout key.pem -out cert.pem -days 2 -subj /CN=localhost")
    certificate, key = read_pair((tmp_path / "cert.pem", tmp_path / "key.pem"))
    assert certificate == (tmp_path / "cert.pem").read_bytes()
    assert key == (tmp_path / "key.pem").read_bytes()


def test_a_certificate_and_its_key_may_be_in_one_file(files: Path, tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_bytes((files / "key.pem").read_bytes() + (files / "cert.pem").read_bytes())
    with ReplayServer([ReplayTable("replay", capacity=10)], tls=(both, both)) as server:
        assert ReplayClient(server.uri, "replay", tls_root_certs=files / "cert.pem").info()["size"] == 0


def test_a_certificate_that_has_expired_is_served_with_a_warning(files: Path) -> None:
    expired, key = files / "expired.pem", files / "key.pem"
    assert find_expiry((files / "cert.pem", key)) is None
    with pytest.warns(UserWarning, match=r"clients will reject the certificate in .*expired.pem': certificate has exp"):
        ReplayServer([ReplayTable("replay", capacity=10)], tls=(expired, key)).close()


@pytest.mark.parametrize(
    ("certificate", "key", "sentence"),
    [
        ("cert.der", "key.pem", "--tls-cert must be a file with a PEM certificate, got none in 'cert.der'"),
        ("cert.pem", "other.pem", "--tls-key must be the private key of the certificate in 'cert.pem'"),
        ("cert.pem", "encrypted.pem", "--tls-key must be a private key without a passphrase"),
        (
            "nowhere.pem",
            "key.pem",
            "--tls-cert must be a file that can be read, got No such file or directory: 'nowhere",
        ),
    ],
)
def test_the_command_reports_its_options_in_errors(files: Path, certificate: str, key: str, sentence: str) -> None:
    command = [sys.executable, "-m", "samplebatch", "serve", "-t", "replay=uniform:9"]
    environment = {**os.environ, "COLUMNS": "300", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [*command, "--tls-cert", certificate, "--tls-key", key],
        cwd=files, env=environment, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr

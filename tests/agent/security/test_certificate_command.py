"""Making certificates from the command line, as docs/security.md says."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import pkcs12
from cryptography.x509 import load_pem_x509_certificate

from bagua_agent.security import certificate_command
from bagua_agent.security.certificate_files import files_in, issue_files, read_tls, utc_now
from bagua_agent.security.certificates import Role
from tests.docs.printed import printed
from tests.lab.wait import HANG_S

ROOT = Path(__file__).parents[3]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bagua_agent.service", "certs", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False)


def test_from_nothing_to_a_certificate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "ca")
    made = run("authority", folder)
    assert made.returncode == 0 and "is valid until 20" in made.stdout
    assert (
        certificate_command.main(
            ["issue", folder, "h1", "--role", "agent", "--host", "h1", "--host", "10.0.0.1"]
        )
        == 0
    )
    assert certificate_command.main(["issue", folder, "ann", "--role", "operator", "--days", "7"]) == 0
    assert capsys.readouterr().out.count("is valid until 20") == 2
    assert read_tls(files_in(tmp_path / "ca" / "h1"), utc_now()).holder.role is Role.AGENT
    assert certificate_command.main(["retire", folder, "ann"]) == 0
    assert f"ann is retired; copy {folder}/revoked.pem to every node" in capsys.readouterr().out
    assert certificate_command.main(["list", folder]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.partition("until")[0] for line in listed] == [
        "the authority  ",
        "h1  agent  ",
        "ann  retired",
    ]


def test_a_mistake_is_one_line_and_ends_with_2(tmp_path: Path) -> None:
    said = run("issue", tmp_path / "ca", "ann", "--role", "viewer")
    assert said.returncode == 2 and said.stdout == ""
    assert "no authority is there; make one first" in said.stderr and said.stderr.count("\n") == 1


def test_a_role_that_is_none_is_named(tmp_path: Path) -> None:
    said = run("issue", tmp_path, "ann", "--role", "king")
    assert said.returncode == 2 and "king" in said.stderr and "operator" in said.stderr


def test_a_renewed_certificate_is_another(tmp_path: Path) -> None:
    folder = str(tmp_path / "ca")
    assert certificate_command.main(["authority", folder]) == 0
    before = Path(issue_files(tmp_path / "ca", "ann", Role.VIEWER, now=utc_now()).cert_file).read_bytes()
    assert certificate_command.main(["issue", folder, "ann", "--role", "viewer"]) == 2
    assert certificate_command.main(["issue", folder, "ann", "--role", "viewer", "--replace"]) == 0
    assert (tmp_path / "ca/ann/certificate.pem").read_bytes() != before


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")
def test_a_browser_takes_a_certificate_and_its_key_as_one_file(tmp_path: Path) -> None:
    assert certificate_command.main(["authority", str(tmp_path)]) == 0
    assert certificate_command.main(["issue", str(tmp_path), "ann", "--role", "viewer"]) == 0
    folder = tmp_path / "ann"
    words = printed("docs/dashboard.md", "openssl pkcs12")
    # a reader types the password of the file
    line = ["openssl", *words, "-passout", "pass:secret"]
    subprocess.run(line, cwd=folder, stdin=subprocess.DEVNULL, timeout=HANG_S, check=True)
    key, certificate, _ = pkcs12.load_key_and_certificates((folder / "ann.p12").read_bytes(), b"secret")
    assert certificate == load_pem_x509_certificate((folder / "certificate.pem").read_bytes())
    assert key is not None and key.public_key() == certificate.public_key()

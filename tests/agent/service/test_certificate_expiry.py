"""A certificate's end is said to people a month before, and keeps no job from the node."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from bagua_agent.etcd.client import Store
from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from bagua_agent.observation.cluster_status import cluster_status
from bagua_agent.security.certificate_files import utc_now
from bagua_agent.security.certificates import AUTHORITY_DAYS, CERTIFICATE_DAYS
from bagua_agent.service.config import agent_config
from bagua_agent.service.config.agent_config import AgentConfig
from bagua_agent.service.node.node_checks import EXPIRY_TOLD, check_certificates, notes, troubles
from bagua_agent.service.state_machine import machine
from tests.agent.service.conftest import People
from tests.agent.service.daemon_here import NODE, running_daemon
from tests.lab.wait import eventually

DEADLINE_S = 20.0
HOUR = timedelta(hours=1)


def config_of(people: People) -> AgentConfig:
    files = people.files["node-1"]
    named = {"ca_file": files.ca_file, "cert_file": files.cert_file, "key_file": files.key_file}
    content = {"etcd": {"endpoints": ["etcd-1:2379"], **named}, "tls": named, "node": {"name": NODE}}
    return agent_config.check(content, "test", NODE)


@pytest.mark.parametrize(
    ("after", "told"),
    [
        (timedelta(0), {}),
        (timedelta(days=CERTIFICATE_DAYS) - EXPIRY_TOLD - HOUR, {}),
        (timedelta(days=CERTIFICATE_DAYS) - EXPIRY_TOLD + HOUR, {"certificate.pem": "expires on"}),
        (timedelta(days=CERTIFICATE_DAYS) + HOUR, {"certificate.pem": "expired on"}),
        # the authority of this test is a month older
        (timedelta(days=AUTHORITY_DAYS - 30) + HOUR, {"certificate.pem": "expired", "ca.pem": "expired"}),
    ],
    ids=str,
)
def test_the_end_of_a_certificate_is_said_in_time(
    people: People, after: timedelta, told: dict[str, str]
) -> None:
    found = check_certificates(config_of(people), utc_now() + after)
    assert troubles(found) == ()
    said = notes(found)
    assert len(said) == len(told)
    for file, words in told.items():
        assert any(f"/{file} {words}" in note for note in said), said


def test_an_authority_beside_a_certificate_or_a_later_authority_hides_nothing(
    people: People, tmp_path: Path
) -> None:
    own = config_of(people)
    both = tmp_path / "both.pem"
    both.write_bytes(Path(own.tls_cert_file).read_bytes() + Path(own.tls_ca_file).read_bytes())
    after = utc_now() + timedelta(days=CERTIFICATE_DAYS) + HOUR
    [note] = notes(check_certificates(replace(own, tls_cert_file=str(both), etcd_cert_file=""), after))
    assert "/both.pem expired" in note
    assert (
        notes(
            check_certificates(
                replace(own, etcd_ca_file=str(both), tls_cert_file="", etcd_cert_file=""), after
            )
        )
        == ()
    )


def test_a_certificate_that_was_removed_is_said(people: People, tmp_path: Path) -> None:
    gone = replace(config_of(people), tls_cert_file=str(tmp_path / "gone.pem"))
    [note] = notes(check_certificates(gone, utc_now()))
    assert "gone.pem" in note and "can't be read" in note


def test_a_daemon_tells_its_log_once_and_the_cluster(
    plain_etcd: EmbeddedEtcd, plain_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "LOOK_EVERY_S", 0.1)
    looks = list[None]()

    def look() -> tuple[str, ...]:
        looks.append(None)
        return ("certificate: it expires",)

    def shown() -> bool:
        [node] = cluster_status(plain_store, complain=print).nodes or [None]
        return node is not None and (node.state, node.reason) == ("ready", "certificate: it expires")

    with running_daemon(plain_etcd, plain_store, tmp_path, look_for_notes=look) as said:
        eventually(shown, DEADLINE_S, lambda: f"the note is shown; it said {said}")
        eventually(lambda: len(looks) > 2, DEADLINE_S, "it looks again")
    assert said.count("certificate: it expires") == 1

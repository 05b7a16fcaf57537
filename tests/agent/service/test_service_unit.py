"""The daemon's unit may write to the directories that its configuration names, and to no others."""

from __future__ import annotations

from bagua_agent.service.service_unit import made_by_systemd, unit_text

PROGRAM, CONFIG = "/opt/bagua/bin/bagua-agent", "/etc/bagua/agent.toml"


def writable(text: str) -> list[str]:
    return [line.partition("=")[2] for line in text.splitlines() if line.startswith("ReadWritePaths=")]


def test_the_usual_directories_are_made_by_systemd() -> None:
    usual = unit_text(PROGRAM, CONFIG, ("/var/lib/bagua", "/var/log/bagua/jobs"))
    assert usual == unit_text(PROGRAM, CONFIG) and writable(usual) == []
    assert f"ExecStart={PROGRAM} serve --config {CONFIG}" in usual
    assert not made_by_systemd("/var/lib/bagua-2")


def test_a_configuration_file_may_have_any_path() -> None:
    for path, word in (
        ("/etc/my 50%/agent.toml", '"/etc/my 50%%/agent.toml"'),
        ("/etc/$HOME/agent.toml", '"/etc/$$HOME/agent.toml"'),
        ("/etc/WRITABLE/agent.toml", "/etc/WRITABLE/agent.toml"),
    ):
        assert f"ExecStart={PROGRAM} serve --config {word}\n" in unit_text(PROGRAM, path)


def test_others_can_be_written_whatever_they_are_called() -> None:
    text = unit_text(PROGRAM, CONFIG, ("/data/PROGRAM", '/data/50% "full"', "/data/PROGRAM"))
    assert writable(text) == ['"/data/50%% \\\\"full\\\\""'.replace("\\\\", "\\"), '"/data/PROGRAM"']

"""The worker reads the environment that the agent wrote; an incomplete one is an error that names what is missing."""

from __future__ import annotations

from dataclasses import MISSING, fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_contract.environment import (
    PREFIX,
    WorkerEnvironment,
    WorkerEnvironmentError,
    staging_bytes_in,
)

# what an operating system lets a variable hold
VALUE = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30)
NUMBER = st.integers(-(2**63), 2**63)

ENVIRONMENTS = st.builds(
    WorkerEnvironment,
    **{f.name: NUMBER if f.type == "int" else VALUE for f in fields(WorkerEnvironment)},  # type: ignore[arg-type]
)

WHOLE = WorkerEnvironment(
    *("job", "worker", "agent", "/run/s", "127.0.0.1"),
    slot=1,
    slots=2,
    staging_bytes=7,
    transport="gloo",
    default_bucket_size=9,
).encode()
REQUIRED = [PREFIX + f.name.upper() for f in fields(WorkerEnvironment) if f.default is MISSING]
OPTIONAL = [PREFIX + f.name.upper() for f in fields(WorkerEnvironment) if f.default is not MISSING]
NUMBERS = [PREFIX + f.name.upper() for f in fields(WorkerEnvironment) if f.type == "int"]


class Reads(dict[str, str]):
    """Remembers which variables were looked at and found."""

    def __init__(self, values: dict[str, str]) -> None:
        super().__init__(values)
        self.seen: set[str] = set()

    def __getitem__(self, name: str) -> str:
        self.seen.add(name)
        return super().__getitem__(name)


@given(ENVIRONMENTS)
def test_every_field_comes_back_as_it_was(environment: WorkerEnvironment) -> None:
    assert WorkerEnvironment.decode(environment.encode()) == environment


def test_every_variable_that_is_written_is_read() -> None:
    environ = Reads(WHOLE)
    WorkerEnvironment.decode(environ)
    assert environ.seen == set(WHOLE)
    assert all(name.startswith(PREFIX) for name in WHOLE)
    assert len(WHOLE) == len(fields(WorkerEnvironment))


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_variable_is_named(name: str) -> None:
    with pytest.raises(WorkerEnvironmentError, match=rf"^{name} is not set"):
        WorkerEnvironment.decode({k: v for k, v in WHOLE.items() if k != name})


@pytest.mark.parametrize("name", OPTIONAL)
def test_an_optional_variable_has_its_default(name: str) -> None:
    read = WorkerEnvironment.decode({k: v for k, v in WHOLE.items() if k != name})
    default = {PREFIX + f.name.upper(): f.default for f in fields(WorkerEnvironment)}[name]
    assert read == WorkerEnvironment.decode({**WHOLE, name: str(default)})


def test_what_users_set_is_not_hidden_by_the_agents_default() -> None:
    from_the_agent = replace(WorkerEnvironment.decode(WHOLE), staging_bytes=-1, transport="auto").encode()
    assert WorkerEnvironment.decode({"BAGUA_TRANSPORT": "nccl", **from_the_agent}).transport == "nccl"
    assert WorkerEnvironment.decode({"BAGUA_STAGING_BYTES": "5", **from_the_agent}).staging_bytes == 5
    assert staging_bytes_in({"BAGUA_STAGING_BYTES": "5"}) == 5
    assert staging_bytes_in(from_the_agent) == -1


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", ["", "two", "1.5", "0x"])
def test_a_number_that_is_none_is_named_with_its_value(name: str, value: str) -> None:
    with pytest.raises(WorkerEnvironmentError, match=rf"^{name}='{value}' is not int$"):
        WorkerEnvironment.decode({**WHOLE, name: value})


def test_other_variables_do_not_matter() -> None:
    assert WorkerEnvironment.decode(
        {**WHOLE, "PATH": "/bin", "BAGUA_LEDGER": "x"}
    ) == WorkerEnvironment.decode(WHOLE)


def test_present_or_not() -> None:
    assert WorkerEnvironment.is_present(WHOLE)
    assert not WorkerEnvironment.is_present({"PATH": "/bin"})

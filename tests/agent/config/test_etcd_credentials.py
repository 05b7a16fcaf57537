"""What the etcd options of a command line become, and what is refused before etcd is asked."""

from __future__ import annotations

import os

import pytest

from bagua_agent.base.errors import UserError
from bagua_agent.config.etcd_credentials import store_config
from bagua_agent.config.job_config import StoreCredentials


def test_a_user_whose_name_is_not_utf_8_is_refused_by_that_name(tmp_path: os.PathLike[str]) -> None:
    password = os.path.join(tmp_path, "password")
    with open(password, "w") as file:
        file.write("secret\n")
    good = StoreCredentials(None, None, None, "trainér", password)
    assert store_config(["h:1"], good).user == "trainér"
    odd = StoreCredentials(None, None, None, os.fsdecode(b"train\xe9r"), password)
    with pytest.raises(UserError, match=r"etcd user 'train\\udce9r' is not UTF-8"):
        store_config(["h:1"], odd)

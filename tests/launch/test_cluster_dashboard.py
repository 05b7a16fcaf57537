"""`bagua-launch dashboard` without a job serves the page of the cluster until Ctrl-C."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import urllib.request

from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from tests.docs.printed import printed

DEADLINE_S = 60.0


def test_the_page_of_a_cluster_is_served_until_ctrl_c(etcd: EmbeddedEtcd) -> None:
    words = printed("docs/dashboard.md", "bagua-launch dashboard", {"ENDPOINTS": etcd.endpoint})
    line = [sys.executable, "-m", "bagua_launch", *words, "--listen", "0"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as command:
        limit = threading.Timer(2 * DEADLINE_S, command.kill)
        limit.start()
        try:
            assert command.stdout is not None
            said = command.stdout.readline()
            found = re.search(r"http://127\.0\.0\.1:[0-9]+/", said)
            assert found is not None, said
            with urllib.request.urlopen(found[0], timeout=DEADLINE_S) as page:
                assert b"cluster.js" in page.read()
            with urllib.request.urlopen(f"{found[0]}api/page", timeout=DEADLINE_S) as data:
                page_data = json.load(data)
            assert page_data["cluster"] and page_data["verdict"]["what"]
            command.send_signal(signal.SIGINT)
            assert command.wait(DEADLINE_S) == 0
        finally:
            limit.cancel()
            command.kill()

"""Runs `bagua-agent`, as `python -m bagua_agent.service`."""

from bagua_agent.service.main import main

if __name__ == "__main__":
    main()

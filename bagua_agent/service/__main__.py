"""`python -m bagua_agent.service`: the same as `bagua-agent`."""

from bagua_agent.service.main import main

if __name__ == "__main__":
    main()

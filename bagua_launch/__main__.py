"""Runs `bagua-launch` as `python -m bagua_launch`."""

from bagua_launch.main import main

if __name__ == "__main__":
    main()

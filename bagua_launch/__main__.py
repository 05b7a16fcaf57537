"""`python -m bagua_launch` is `bagua-launch`."""

from bagua_launch.main import cli

if __name__ == "__main__":
    cli(prog_name="bagua-launch")
